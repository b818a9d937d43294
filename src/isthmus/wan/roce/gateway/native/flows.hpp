// `OutgoingFlow` and `IncomingFlow`, as `outgoing_flow.py`, `incoming_flow.py`, `dcqcn.py` and `timer_heap.py`.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <list>
#include <memory>
#include <queue>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "near_responder.hpp"

namespace isthmus {

constexpr double NEVER = std::numeric_limits<double>::infinity();
constexpr int64_t FRAME_BYTES = 64, NUMBER_SPAN = int64_t(1) << 32;
constexpr uint32_t NO_QUEUE_PAIR = 0xFFFFFFFF;
constexpr size_t MAX_RANGES = 64;
enum class Failure : uint8_t { LINK, NIC, REFUSED, GAP, MEMORY, PEER };

inline int64_t full_number(uint32_t low, int64_t near) {
    return near + int64_t(uint32_t(low - uint32_t(near) + 0x80000000u)) - 0x80000000;
}

struct Settings {
    double link_bytes_per_s, nic_bytes_per_s, queue_mark_bytes, round_trip_s;
    double near_notify_interval_s, feedback_interval_s, reorder_s, nic_timeout_s, suspect_s, idle_s;
    int64_t max_flow_bytes, max_total_bytes, max_queue_pairs, max_tries, datagram_overhead_bytes;
    bool acknowledge_near;
};

struct HeldBytes {
    int64_t most, used = 0, unsent = 0;
};

struct Range {
    uint32_t low, count;
};

struct Feedback {
    uint32_t flow = 0, low_floor = 0, low_done = 0, kilobytes_per_s = 0, held_bytes = 0, queue_pair = NO_QUEUE_PAIR;
    uint32_t low_latest = 0, age_us = 0;
    std::vector<Range> missing;
};

template <class Flow> class TimerHeap {
  public:
    double next_s() {
        while (!heap_.empty() && heap_.top().owner->timer_s != heap_.top().due_s) heap_.pop();
        return heap_.empty() ? NEVER : heap_.top().due_s;
    }
    void set(const std::shared_ptr<Flow> &owner, double due_s) {
        if (due_s < owner->timer_s) {
            owner->timer_s = due_s;
            heap_.push({due_s, ++count_, owner});
        }
    }
    std::vector<std::shared_ptr<Flow>> pop_due(double now_s) {
        std::vector<std::shared_ptr<Flow>> found;
        while (next_s() <= now_s && !heap_.empty()) {
            found.push_back(heap_.top().owner);
            heap_.pop();
            found.back()->timer_s = NEVER;
        }
        return found;
    }

  private:
    struct Timer {
        double due_s;
        uint64_t number;
        std::shared_ptr<Flow> owner;
        bool operator<(const Timer &other) const {
            return due_s != other.due_s ? due_s > other.due_s : number > other.number;
        }
    };
    std::priority_queue<Timer> heap_;
    uint64_t count_ = 0;
};

class DcqcnRate {
  public:
    explicit DcqcnRate(double port) : port_(port), current_(port), target_(port) {}
    void notify(double now_s) {
        if (is_limited()) catch_up(now_s);
        else alpha_ = 1.0;
        target_ = current_;
        current_ = std::max(port_ * (1.0 / 1000), current_ * (1 - alpha_ / 2));
        alpha_ = (1 - GAIN) * alpha_ + GAIN;
        alpha_s_ = increase_s_ = now_s;
        num_timers_ = num_rounds_ = num_bytes_ = 0;
    }
    void sent(int64_t num_bytes) {
        if (!is_limited()) return;
        num_bytes_ += num_bytes;
        if (num_bytes_ >= 10 * (1 << 20)) {
            num_bytes_ -= 10 * (1 << 20);
            ++num_rounds_;
            increase();
        }
    }
    double bytes_per_s(double now_s) {
        if (is_limited()) catch_up(now_s);
        return current_;
    }

  private:
    static constexpr double GAIN = 1.0 / 256, INTERVAL_S = 55e-6, INCREASE_S = 1.5e-3;
    bool is_limited() const { return current_ < port_; }
    void catch_up(double now_s) {
        const double rounds = std::trunc((now_s - alpha_s_) / INTERVAL_S);
        if (rounds > 0) {
            alpha_ *= std::pow(1 - GAIN, rounds);
            alpha_s_ += rounds * INTERVAL_S;
        }
        while (is_limited() && now_s - increase_s_ >= INCREASE_S) {
            increase_s_ += INCREASE_S;
            ++num_timers_;
            increase();
        }
    }
    void increase() {
        if (std::min(num_timers_, num_rounds_) > 5) target_ += port_ * (1.0 / 100);
        else if (std::max(num_timers_, num_rounds_) > 5) target_ += port_ * (1.0 / 1000);
        target_ = std::min(target_, port_);
        current_ = (target_ + current_) / 2;
        if (current_ > port_ * 0.9999) current_ = port_;
    }
    double port_, current_, target_, alpha_ = 1.0, alpha_s_ = 0.0, increase_s_ = 0.0;
    int64_t num_timers_ = 0, num_rounds_ = 0, num_bytes_ = 0;
};

class OutgoingFlow {
  public:
    OutgoingFlow(uint32_t number, const RoceView &view, const Settings &settings, HeldBytes &total)
        : flow(number), source_port(view.source_port), key(view.key), total_(total),
          most_bytes_(settings.max_flow_bytes) {
        responder.is_on = settings.acknowledge_near;
    }
    uint32_t flow, source_port;
    Key key;
    RequestOrder order;
    NearResponder responder;
    bool is_paired = false, is_ready = false;
    std::optional<Failure> failed;
    double timer_s = NEVER, due_s = 0.0, rate_bytes_per_s = NEVER;
    int64_t held_bytes = 0, unsent_bytes = 0, notified_bytes = 0;
    double used_s = -NEVER, notified_s = -NEVER, rewound_s = -NEVER, read_again_s = -NEVER;
    double heard_s = -NEVER, probed_s = -NEVER;
    int64_t num_silent = 0;
    std::pair<int64_t, int64_t> starts_ahead{-1, 0};
    bool is_open = true;  // in the table of its side
    std::list<std::shared_ptr<OutgoingFlow>>::iterator place;

    bool is_done() const { return kept_.empty(); }
    int64_t queue_bytes() const { return rate_bytes_per_s == NEVER ? total_.unsent : unsent_bytes; }
    bool can_send() const { return next_unsent_ < next() || !again_.empty(); }
    bool awaits_feedback() const { return done_ < next_unsent_; }
    bool has_room(int64_t size) const {
        size += FRAME_BYTES;
        return held_bytes + size <= most_bytes_ && total_.used + size <= total_.most;
    }
    void add(const Object &frame) {
        const int64_t size = PyBytes_GET_SIZE(frame.get());
        kept_.push_back({frame});
        hold(size + FRAME_BYTES);
        wait(size);
    }
    struct Next {
        int64_t number;
        const Object *frame;
        bool is_again;
    };
    std::optional<Next> next_frame(double now_s) {
        int64_t number = -1;
        while (!again_.empty() && number < 0) {
            if (has(again_.front())) number = again_.front();
            again_.pop_front();
        }
        if (number < 0) {
            if (next_unsent_ >= next()) return {};
            number = next_unsent_++;
            wait(-PyBytes_GET_SIZE(kept(number).frame.get()));
        }
        Kept &one = kept(number);
        one.sent_s = now_s;
        return Next{number, &one.frame, ++one.num_tries > 1};
    }
    std::pair<std::optional<double>, int64_t> take_feedback(const Feedback &entry, double now_s, double round_trip_s) {
        const int64_t floor = full_number(entry.low_floor, floor_), done = full_number(entry.low_done, done_);
        if (!(done_ <= done && done <= floor && floor <= next_unsent_)) return {{}, 0};
        num_silent = 0, heard_s = now_s;
        std::optional<double> sample_s;
        const int64_t latest = full_number(entry.low_latest, floor_);
        if (has(latest) && kept(latest).num_tries == 1 && !kept(latest).is_timed) {
            kept(latest).is_timed = true;
            sample_s = std::max(0.0, now_s - kept(latest).sent_s - entry.age_us * 1e-6);
        }
        floor_ = floor;
        for (; done_ < done; ++done_) {
            hold(-(PyBytes_GET_SIZE(kept_.front().frame.get()) + FRAME_BYTES));
            kept_.pop_front();
        }
        return {sample_s, entry.missing.empty() ? 0 : ask_again(entry.missing, now_s, round_trip_s)};
    }
    void adapt_rate(const Feedback &entry, double mark_bytes, double most_bytes_per_s) {
        if (double(entry.held_bytes) > mark_bytes) {
            rate_bytes_per_s = std::max(entry.kilobytes_per_s * 1000.0 * 0.9, most_bytes_per_s / 1000);
        } else if (rate_bytes_per_s < NEVER) {
            const double grown = rate_bytes_per_s * 1.25;
            rate_bytes_per_s = grown < most_bytes_per_s ? grown : NEVER;
        }
    }
    double silent_s(double timeout_s) {
        std::optional<double> oldest_s = oldest_sent_s();
        if (!oldest_s) oldest_s = kept_.empty() ? heard_s : std::max(heard_s, kept_.front().sent_s);
        return std::max(*oldest_s, probed_s) + timeout_s * double(1 << std::min<int64_t>(num_silent, 4));
    }
    std::optional<double> oldest_sent_s() {
        if (floor_ >= next_unsent_ || !again_.empty()) return {};
        return kept(floor_).sent_s;
    }
    int64_t send_oldest_again() {
        again_.push_back(floor_);
        return kept(floor_).num_tries;
    }
    void begin_again(uint32_t number) {
        flow = number;
        int64_t total = 0;
        for (Kept &one : kept_) {
            one = {one.frame};
            total += PyBytes_GET_SIZE(one.frame.get());
        }
        next_unsent_ = floor_ = done_ = 0;
        again_.clear();
        wait(total - unsent_bytes);
        num_silent = 0, rate_bytes_per_s = NEVER;
    }
    void clear() {
        hold(-held_bytes);
        wait(-unsent_bytes);
        next_unsent_ = floor_ = done_ = next();
        kept_.clear();
        again_.clear();
    }

  private:
    struct Kept {
        Object frame;
        double sent_s = -NEVER;
        int64_t num_tries = 0;
        bool is_timed = false;
    };
    int64_t next() const { return done_ + int64_t(kept_.size()); }
    bool has(int64_t number) const { return number >= done_ && number < next(); }
    Kept &kept(int64_t number) { return kept_[size_t(number - done_)]; }
    void hold(int64_t num_bytes) { held_bytes += num_bytes, total_.used += num_bytes; }
    void wait(int64_t num_bytes) { unsent_bytes += num_bytes, total_.unsent += num_bytes; }
    int64_t ask_again(const std::vector<Range> &missing, double now_s, double round_trip_s) {
        int64_t most = 0;
        for (const Range &range : missing) {
            const int64_t first = full_number(range.low, floor_);
            for (int64_t number = std::max(first, floor_); number < std::min(first + range.count, next_unsent_);
                 ++number) {
                if (!has(number) || now_s - kept(number).sent_s < 0.98 * round_trip_s) continue;
                kept(number).sent_s = now_s;
                most = std::max(most, kept(number).num_tries);
                again_.push_back(number);
                if (kept(number).num_tries >= 2) again_.push_back(number);
            }
        }
        return most;
    }

    HeldBytes &total_;
    int64_t most_bytes_, next_unsent_ = 0, floor_ = 0, done_ = 0;  // `kept_` begins with number `done_`
    Queue<Kept> kept_;
    Queue<int64_t> again_;
};

struct Handed {
    int64_t number;
    RoceView view;
    int64_t last_psn = -1;
    bool wants_answer = false, is_pending = false, is_answered = false;
    int64_t size() const { return view.size(); }
};

class IncomingFlow {
  public:
    IncomingFlow(uint32_t number, const RoceView &view, const Settings &settings, HeldBytes &total)
        : flow(number), source_port(view.source_port), key(view.key), rate(settings.nic_bytes_per_s),
          settings_(settings), total_(total) {}
    uint32_t flow, source_port, queue_pair = NO_QUEUE_PAIR;
    Key key;
    RequestOrder order;
    DcqcnRate rate;
    std::optional<int64_t> acked;
    bool has_acknowledged = false, is_orphan = false, was_acknowledged_near = false, is_shared = false;
    bool is_touched = false, is_dirty = false;
    std::optional<Failure> failed;
    double timer_s = NEVER, suspect_s = NEVER, used_s = 0.0, due_s = 0.0;
    int64_t held_bytes = 0, queue_bytes = 0, floor = 0, end = 0, num_nic_tries = 0;
    bool is_open = true;  // in the table of its side
    std::list<std::shared_ptr<IncomingFlow>>::iterator place;

    int64_t done() const {
        if (!pending_.empty()) return pending_.front()->number;
        return queue_.empty() ? floor : queue_.front()->number;
    }
    bool is_done() const { return done() == end; }
    bool has(int64_t number) const { return number < floor || early_.count(number); }
    bool has_room(int64_t number, int64_t size) const {
        if (number > end) size += FRAME_BYTES * (number - end);
        return held_bytes + size <= settings_.max_flow_bytes && total_.used + size <= total_.most;
    }
    // Takes a frame that has not come before; `ready` gets each that is in order now.
    template <class Ready> void add(int64_t number, RoceView &&view, double now_s, Ready ready) {
        if (number > end) {
            asked_.push({now_s + settings_.reorder_s, end, number, true});
            hold(FRAME_BYTES * (number - end));
        } else if (number < end) {
            hold(-FRAME_BYTES);
        }
        latest_ = number, latest_s_ = now_s;
        hold(view.size());
        if (number == floor && early_.empty()) {
            floor = number + 1, end = std::max(end, floor);
            ready(std::move(view));
            return;
        }
        end = std::max(end, number + 1);
        early_.emplace(number, std::move(view));
        std::vector<RoceView> found;
        for (auto next = early_.find(floor); next != early_.end(); next = early_.find(floor)) {
            found.push_back(std::move(next->second));
            early_.erase(next);
            ++floor;
        }
        for (RoceView &one : found) ready(std::move(one));
    }
    std::vector<Range> missing(double now_s, double again_s) {
        std::vector<Range> found;
        while (!asked_.empty() && std::get<0>(asked_.top()) <= now_s && found.size() < MAX_RANGES) {
            const auto [_, first, stop_at, is_first] = asked_.top();
            asked_.pop();
            const double repeat_s = std::min(settings_.feedback_interval_s, again_s / 2);
            const double due = now_s + (is_first ? repeat_s : again_s - repeat_s);
            for (const auto &[start, stop] : holes(std::max(first, floor), stop_at)) {
                asked_.push({due, start, stop, !is_first});
                for (int64_t at = start; at < stop; at += 0xFFFF)
                    found.push_back({uint32_t(at), uint32_t(std::min<int64_t>(stop - at, 0xFFFF))});
            }
        }
        return found;
    }
    double ask_s() {
        while (!asked_.empty() && std::get<2>(asked_.top()) <= floor) asked_.pop();
        return asked_.empty() ? NEVER : std::get<0>(asked_.top());
    }
    Feedback feedback(double now_s, std::vector<Range> &&missing) {
        const double rate = double(measured_bytes_) / std::max(now_s - measured_s_, 1e-6);
        measured_s_ = now_s, measured_bytes_ = 0;
        const auto bounded = [](double value) { return uint32_t(std::clamp(value, 0.0, double(NUMBER_SPAN - 1))); };
        return {flow, uint32_t(floor), uint32_t(done()), bounded(rate / 1000), bounded(double(queue_bytes)),
                queue_pair, uint32_t(latest_), bounded((now_s - latest_s_) * 1e6), std::move(missing)};
    }
    void queue(RoceView &&view, int64_t last_psn, bool wants_answer = false) {
        if (queue_.empty()) measured_s_ = latest_s_, measured_bytes_ = 0;
        queue_bytes += view.size();
        queue_.push_back(std::make_shared<Handed>(Handed{last_number_, std::move(view), last_psn, wants_answer}));
    }
    void advance() { ++last_number_; }
    bool has_frames() const { return !queue_.empty(); }
    std::shared_ptr<Handed> next_frame(double now_s) {
        std::shared_ptr<Handed> one = std::move(queue_.front());
        queue_.pop_front();
        const int64_t size = one->size();
        queue_bytes -= size;
        if (one->is_answered) return nullptr;
        measured_bytes_ += size;
        if (one->last_psn < 0) {
            hold(-size);
            return one;
        }
        if (!one->is_pending) {
            one->is_pending = true;
            pending_.push_back(one);
            pending_bytes_ += size;
        }
        if (one->wants_answer && nic_s_ == NEVER) set_nic_timer(now_s);
        while (queue_pair == NO_QUEUE_PAIR && pending_bytes_ > 1 << 20) pop_pending();
        return one;
    }
    void answered(int64_t psn, double now_s) {
        const size_t before = pending_.size();
        if (!acked || psn_distance(*acked, psn) > 0) acked = psn;
        while (!pending_.empty() && psn_distance(pending_.front()->last_psn, psn) >= 0) pop_pending();
        if (pending_.size() == before) return;
        num_nic_tries = 0, nic_s_ = NEVER;
        for (const auto &one : pending_)
            if (one->wants_answer) {
                set_nic_timer(now_s);
                break;
            }
    }
    void send_again(double now_s, double wait_s = 0.0) {
        if (queue_.empty()) measured_s_ = now_s, measured_bytes_ = 0;
        Queue<std::shared_ptr<Handed>> found = pending_;
        for (auto &one : queue_)
            if (!one->is_pending || one->is_answered) found.push_back(std::move(one));
        queue_ = std::move(found);
        queue_bytes = 0;
        for (const auto &one : queue_) queue_bytes += one->size();
        due_s = std::max(due_s, now_s + wait_s);
        set_nic_timer(now_s + wait_s);
    }
    bool is_suspect() const { return suspect_s < NEVER; }
    bool is_answered(int64_t psn) const { return acked && psn_distance(psn, *acked) >= 0; }
    bool is_expected_at(int64_t psn) const { return order.has_begun() && psn == order.first_expected(); }
    bool is_pending(int64_t psn) const {
        return !pending_.empty() && psn_distance(pending_.front()->view.psn, psn) >= 0 &&
               psn_distance(psn, pending_.back()->last_psn) >= 0;
    }
    double unproven_s() const {
        return queue_pair != NO_QUEUE_PAIR || pending_.empty() || !queue_.empty() ? NEVER : used_s + 1.0;
    }
    void release_unproven() {
        while (!pending_.empty()) pop_pending();
    }
    double nic_s() const { return !pending_.empty() && queue_pair != NO_QUEUE_PAIR ? nic_s_ : NEVER; }
    double next_s(double hand_wait_s) {
        if (failed) return NEVER;
        double due = suspect_s;
        if (!asked_.empty()) due = std::min(due, ask_s());
        if (!queue_.empty()) due = std::min(due, due_s + hand_wait_s);
        return pending_.empty() ? due : std::min({due, nic_s(), unproven_s()});
    }
    void drop(const RoceView &view) { hold(-view.size()); }
    void clear() {
        hold(-held_bytes);
        queue_bytes = pending_bytes_ = 0;
        early_.clear(), queue_.clear(), pending_.clear();
        asked_ = {};
        floor = last_number_ = end;
    }
    void begin_again() {
        int64_t early = 0;
        for (const auto &one : early_) early += one.second.size();
        hold(-early - FRAME_BYTES * (end - floor - int64_t(early_.size())));
        early_.clear();
        asked_ = {};
        floor = end = last_number_ = latest_ = 0;
        for (auto *frames : {&pending_, &queue_})
            for (const auto &one : *frames) one->number = 0;
    }

  private:
    std::vector<std::pair<int64_t, int64_t>> holes(int64_t first, int64_t stop) const {
        std::vector<std::pair<int64_t, int64_t>> found;
        for (int64_t number = first; number < stop; ++number) {
            if (early_.count(number)) continue;
            if (!found.empty() && found.back().second == number) ++found.back().second;
            else found.push_back({number, number + 1});
        }
        return found;
    }
    void hold(int64_t num_bytes) { held_bytes += num_bytes, total_.used += num_bytes; }
    void pop_pending() {
        const std::shared_ptr<Handed> one = std::move(pending_.front());
        pending_.pop_front();
        one->is_answered = true;
        pending_bytes_ -= one->size();
        hold(-one->size());
    }
    void set_nic_timer(double now_s) {
        nic_s_ = now_s + settings_.nic_timeout_s * double(1 << std::min<int64_t>(num_nic_tries, 6));
    }

    const Settings &settings_;
    HeldBytes &total_;
    std::unordered_map<int64_t, RoceView> early_;
    using Asked = std::tuple<double, int64_t, int64_t, bool>;
    std::priority_queue<Asked, std::vector<Asked>, std::greater<Asked>> asked_;
    Queue<std::shared_ptr<Handed>> queue_, pending_;
    int64_t pending_bytes_ = 0, last_number_ = 0, measured_bytes_ = 0, latest_ = 0;
    double nic_s_ = NEVER, measured_s_ = 0.0, latest_s_ = 0.0;
};

}  // namespace isthmus
