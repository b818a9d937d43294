// `IncomingSide`, as `incoming_side.py`.
#pragma once
#include "outgoing_side.hpp"

namespace isthmus {

constexpr double RNR_TIMERS_MS[32] = {655.36, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32,
                                      0.48, 0.64, 0.96, 1.28, 1.92, 2.56, 3.84, 5.12, 7.68, 10.24, 15.36,
                                      20.48, 30.72, 40.96, 61.44, 81.92, 122.88, 163.84, 245.76, 327.68, 491.52};

class IncomingSide {
  public:
    using Flow = std::shared_ptr<IncomingFlow>;
    IncomingSide(const Settings &settings, LinkState &link, QueuePairs &pairs, const Connections &connections,
                 OutgoingSide &outgoing)
        : held{settings.max_total_bytes}, settings_(settings), link_(link), pairs_(pairs), connections_(connections),
          outgoing_(outgoing) {}
    HeldBytes held;
    int64_t num_refused = 0, num_handed = 0, num_repeated = 0, num_handed_again = 0;
    std::vector<Flow> failed;

    size_t size() const { return flows_.size(); }
    double next_s() { return std::min(timers_.next_s(), feedback_s_); }
    Flow flow(const Key &key) const { return flows_.find(key); }

    // From the link

    void take(uint32_t number_of_flow, uint32_t low_number, const Object &frame, bool is_shared, double now_s,
              Instructions &out) {
        std::optional<RoceView> view = view_frame(frame);
        if (!view) {
            ++num_refused;
            return;
        }
        Flow flow = flows_.find(number_of_flow);
        if (!flow) flow = open(number_of_flow, *view, now_s);
        if (!flow || !(flow->key == view->key)) {
            ++num_refused;
            return;
        }
        if (flow->failed) {
            tell(flow->flow, *flow->failed);
            ask_feedback(now_s);
            return;
        }
        const int64_t number = full_number(low_number, flow->floor);
        if (number < 0 || flow->has(number)) {
            ++num_repeated;
        } else if (!flow->has_room(number, view->size())) {
            ++num_refused;
        } else {
            flow->used_s = now_s;
            flow->was_acknowledged_near |= link_.peer_acknowledges;
            flow->is_shared |= is_shared;
            flow->add(number, std::move(*view), now_s,
                      [&](RoceView &&ready) { put_in_order(flow, std::move(ready), now_s, out); });
        }
        touch(flow);
    }
    void begin_anew(const Key &key) {
        if (const Flow flow = flows_.find(key)) close(flow);
    }
    void forget(uint32_t number) {
        const Flow flow = flows_.find(number);
        if (flow && flow->is_done()) close(flow);
    }
    void failed_there(uint32_t number, Failure reason, double now_s, Instructions &out) {
        if (const Flow flow = flows_.find(number)) fail(flow, reason, now_s, out, false);
    }
    void probe(uint32_t number, double now_s) {
        const Flow flow = flows_.find(number);
        if (flow && !flow->failed) {
            mark_dirty(flow, now_s);
            return;
        }
        tell(number, flow ? *flow->failed : Failure::GAP);
        ask_feedback(now_s);
    }
    void lose_peer(double now_s) {
        flows_.forget_numbers();
        closed_.clear(), closed_order_.clear();
        forget_dirty();
        told_.clear(), told_at_.clear();
        for (const Flow &flow : flows_.all()) {
            flow->is_orphan = true;
            flow->begin_again();
            if (flow->was_acknowledged_near && flow->order.has_begun() && !flow->failed)
                flow->suspect_s = now_s + settings_.suspect_s;
            timers_.set(flow, std::min(flow->suspect_s, now_s + settings_.idle_s));
        }
    }

    // To the NIC

    bool answer(const RoceView &view, double now_s, Instructions &out) {
        const Key *key = pairs_.incoming_of(view.key);
        const Flow flow = key ? flows_.find(*key) : learn(view, now_s);
        if (!flow) return false;
        if (flow->queue_pair == NO_QUEUE_PAIR) pair(flow, view.key.number);  // the other direction has shown it
        touch(flow);
        return take_answer(flow, view, now_s, out);
    }
    void finish(double now_s, Instructions &out) {
        for (const Flow &flow : touched_) {
            flow->is_touched = false;
            if (!flow->is_open) continue;
            hand_over(*flow, now_s, out);
            set_timer(flow, now_s);
            mark_dirty(flow, now_s);
        }
        touched_.clear();
    }
    bool slow_down(const Key &key, double now_s) {
        const Key *incoming = pairs_.incoming_of(key);
        const Flow flow = incoming ? flows_.find(*incoming) : nullptr;
        if (flow) flow->rate.notify(now_s);
        return flow != nullptr;
    }
    void fail(const Flow &flow, Failure reason, double now_s, Instructions &out, bool tells = true) {
        if (flow->failed) return;
        flow->failed = reason;
        flow->clear();
        clean(flow);
        if (tells && !flow->is_orphan) {
            tell(flow->flow, reason);
            feedback_s_ = now_s;
        }
        out.queue_pair_failed(flow->key, reason);
        failed.push_back(flow);
    }
    // What a message sets up is over for what a former queue pair of its numbers left.
    void note_connection(const RoceView &view, bool is_from_here) {
        const auto found = connections_.note(view);
        if (!found) return;
        const auto &[back, there] = is_from_here ? *found : std::pair(found->second, found->first);
        outgoing_.begin_anew(there.key);
        begin_anew(back.key);
    }

    // Time

    void tick(double now_s, Instructions &out) {
        for (const Flow &flow : timers_.pop_due(now_s)) {
            if (!flow->is_open) continue;
            if (now_s - flow->used_s >= 2 * settings_.idle_s && flow->is_done()) {
                close(flow);
                continue;
            }
            if (!flow->failed) {
                if (now_s >= flow->suspect_s) fail(flow, Failure::GAP, now_s, out);
                else if (now_s >= flow->nic_s()) hand_again(flow, now_s, out);
                hand_over(*flow, now_s, out);
                if (now_s >= flow->unproven_s()) {
                    flow->release_unproven();
                    mark_dirty(flow, now_s);
                }
                if (flow->ask_s() <= now_s) {
                    make_dirty(flow);
                    feedback_s_ = now_s;
                }
            }
            set_timer(flow, now_s);
        }
        if (feedback_s_ <= now_s) give_feedback(now_s, out);
    }

  private:
    static constexpr double BURST_S = 50e-6;

    void put_in_order(const Flow &flow, RoceView &&view, double now_s, Instructions &out) {
        if (flow->failed) return;
        if (!is_in(REQUESTS, view.opcode)) {
            const RoceView message = view;
            flow->queue(std::move(view), -1);
            if (message.opcode == DATAGRAM_SEND_ONLY) note_connection(message, false);
        } else {
            Place place = flow->order.place(view.psn);
            const bool is_far = place == Place::AHEAD || place == Place::ELSEWHERE;
            if (is_far && flow->is_suspect() && !is_in(STARTS, view.opcode)) place = Place::AHEAD;
            if (place == Place::AHEAD && flow->is_suspect()) {
                fail(flow, Failure::GAP, now_s, out);
                return;
            }
            flow->suspect_s = NEVER;
            if (place == Place::BEHIND) {
                if (flow->is_pending(view.psn) && flow->queue_pair != NO_QUEUE_PAIR) flow->drop(view);
                else flow->queue(std::move(view), -1);  // the NIC answers it once more
            } else {
                if (place != Place::NEXT) flow->order.rewind(view.psn);
                const bool wants_answer = view.wants_ack || is_in(READS_AND_ATOMICS, view.opcode);
                const int64_t last_psn = flow->order.take(view);
                flow->queue(std::move(view), last_psn, wants_answer);
            }
        }
        flow->advance();
    }
    Flow open(uint32_t number, const RoceView &view, double now_s) {
        if (closed_.count(number)) return nullptr;
        if (const Flow flow = flows_.find(view.key)) {
            if (flow->is_orphan) {
                flow->is_orphan = false;
                flow->flow = number;
                flows_.name(flow);
                return flow;
            }
            if (uint32_t(number - flow->flow) >= 0x80000000u) return nullptr;
            close(flow);
        }
        if (int64_t(flows_.size()) >= settings_.max_queue_pairs && !evict_idle(now_s)) return nullptr;
        const Flow flow = std::make_shared<IncomingFlow>(number, view, settings_, held);
        flows_.add(flow);
        pairs_.enter(flow->key, flow->source_port);
        if (const auto found = connections_.take(flow->key)) {
            pairs_.join(found->back, flow->key);
            flow->order.begin(found->first_psn, found->mtu_bytes);
        }
        if (const Key *outgoing = pairs_.outgoing_of(flow->key)) flow->queue_pair = outgoing->number;
        else unpaired_[flow->key.with(flow->source_port)] = flow;
        return flow;
    }
    bool evict_idle(double now_s) {
        int looked = 0;
        for (const Flow &flow : flows_.all()) {
            if (looked++ == 64) return false;
            if (flow->is_done() && now_s - flow->used_s >= settings_.idle_s / 4) {
                close(Flow(flow));
                return true;
            }
        }
        return false;
    }
    void hand_over(IncomingFlow &flow, double now_s, Instructions &out) {
        while (flow.has_frames() && now_s >= flow.due_s) {
            const std::shared_ptr<Handed> one = flow.next_frame(now_s);
            if (!one) continue;
            if (is_in(RESPONSES, one->view.opcode)) {
                const Key *key = pairs_.outgoing_of(flow.key);
                if (key && !outgoing_.answered(Key(*key), one->view, out)) continue;
            }
            ++num_handed;
            out.send_to_nic(one->view.frame);
            flow.rate.sent(one->size());
            flow.due_s = std::max(flow.due_s, now_s - BURST_S) + double(one->size()) / flow.rate.bytes_per_s(now_s);
        }
    }
    bool take_answer(const Flow &flow, const RoceView &view, double now_s, Instructions &out) {
        const int64_t psn = view.psn, previous = (psn - 1) & (PSN_SPAN - 1);
        const uint8_t syndrome = view.opcode == ACKNOWLEDGE ? view.syndrome() : 0;
        if (syndrome < RNR_FIRST) {
            flow->answered(is_in(PARTIAL_RESPONSES, view.opcode) ? previous : psn, now_s);
            flow->has_acknowledged = true;
            return false;
        }
        if (flow->is_answered(psn)) return syndrome <= NAK_SEQUENCE;  // late
        flow->answered(previous, now_s);
        if (syndrome <= RNR_LAST && flow->is_pending(psn)) {
            flow->send_again(now_s, 1e-3 * RNR_TIMERS_MS[syndrome & 31]);
            return true;
        }
        if (syndrome != NAK_SEQUENCE) return false;
        if (flow->is_pending(psn)) {
            hand_again(flow, now_s, out);
            return true;
        }
        if (flow->is_expected_at(psn)) return true;  // late: what it names was not sent yet, or waits for its turn
        if (flow->was_acknowledged_near && flow->has_acknowledged) {
            fail(flow, Failure::GAP, now_s, out);
            return true;
        }
        return false;
    }
    void hand_again(const Flow &flow, double now_s, Instructions &out) {
        ++flow->num_nic_tries;
        ++num_handed_again;
        if (flow->num_nic_tries > settings_.max_tries) fail(flow, Failure::NIC, now_s, out);
        else flow->send_again(now_s);
    }
    Flow learn(const RoceView &view, double now_s) {
        const Key place = view.key.reversed(view.source_port);
        const auto found = unpaired_.find(place);
        if (found == unpaired_.end() || found->second->is_shared || !found->second->is_pending(view.psn)) return nullptr;
        const Flow flow = found->second;
        if (pairs_.is_shared(place, view.source_port) || !pairs_.join(view.key, flow->key)) return nullptr;
        pair(flow, view.key.number);
        make_dirty(flow);
        feedback_s_ = now_s;  // ahead of the answer, which tells the near gateway how to acknowledge
        return flow;
    }
    void pair(const Flow &flow, uint32_t queue_pair) {
        flow->queue_pair = queue_pair;
        leave_unpaired(flow);
    }
    void close(const Flow &flow) {
        flow->clear();
        pairs_.part_incoming(flow->key);
        pairs_.leave(flow->key, flow->source_port);
        if (flows_.remove(flow) && closed_.insert(flow->flow).second) {
            closed_order_.push_back(flow->flow);
            if (closed_order_.size() > 65536) {
                closed_.erase(closed_order_.front());
                closed_order_.pop_front();
            }
        }
        clean(flow);
        leave_unpaired(flow);
    }
    void leave_unpaired(const Flow &flow) {
        const auto found = unpaired_.find(flow->key.with(flow->source_port));
        if (found != unpaired_.end() && found->second == flow) unpaired_.erase(found);
    }
    void give_feedback(double now_s, Instructions &out) {
        feedback_s_ = NEVER;
        if (!link_.is_known()) return;
        std::vector<std::string> entries, failures;
        for (const Flow &flow : dirty_) {
            if (flow->is_orphan) continue;
            std::vector<Range> missing = flow->missing(now_s, link_.ask_again_s());
            const bool is_missing = !missing.empty();
            entries.push_back(packed(flow->feedback(now_s, std::move(missing))));
            if (is_missing) set_timer(flow, now_s);
        }
        for (const auto &[flow, reason] : told_) failures.push_back(packed_failure(flow, false, reason));
        forget_dirty();
        told_.clear(), told_at_.clear();
        if (!entries.empty()) out.send_list(Kind::FEEDBACK, link_.origin, entries);
        if (!failures.empty()) out.send_list(Kind::FAILED, link_.origin, failures);
    }
    void touch(const Flow &flow) {
        if (!flow->is_touched) {
            flow->is_touched = true;
            touched_.push_back(flow);
        }
    }
    void make_dirty(const Flow &flow) {
        if (!flow->is_dirty) {
            flow->is_dirty = true;
            dirty_.push_back(flow);
        }
    }
    void clean(const Flow &flow) {
        if (!flow->is_dirty) return;
        flow->is_dirty = false;
        dirty_.erase(std::find(dirty_.begin(), dirty_.end(), flow));
    }
    void forget_dirty() {
        for (const Flow &flow : dirty_) flow->is_dirty = false;
        dirty_.clear();
    }
    void mark_dirty(const Flow &flow, double now_s) {
        if (flow->failed || flow->is_orphan) return;
        make_dirty(flow);
        ask_feedback(now_s);
    }
    void tell(uint32_t flow, Failure reason) {
        const auto [at, is_new] = told_at_.try_emplace(flow, told_.size());
        if (is_new) told_.push_back({flow, reason});
        else told_[at->second].second = reason;
    }
    void ask_feedback(double now_s) { feedback_s_ = std::min(feedback_s_, now_s + settings_.feedback_interval_s); }
    void set_timer(const Flow &flow, double now_s) {
        const double due = std::min(flow->next_s(BURST_S / 2), now_s + 2 * settings_.idle_s);
        if (due < flow->timer_s) timers_.set(flow, std::max(now_s + 1e-6, due));
    }

    const Settings &settings_;
    LinkState &link_;
    QueuePairs &pairs_;
    const Connections &connections_;
    OutgoingSide &outgoing_;
    FlowTable<IncomingFlow> flows_;
    std::unordered_set<uint32_t> closed_;
    Queue<uint32_t> closed_order_;
    std::unordered_map<Key, Flow, KeyHash> unpaired_;
    TimerHeap<IncomingFlow> timers_;
    std::vector<Flow> dirty_, touched_;
    std::vector<std::pair<uint32_t, Failure>> told_;
    std::unordered_map<uint32_t, size_t> told_at_;
    double feedback_s_ = NEVER;
};

}  // namespace isthmus
