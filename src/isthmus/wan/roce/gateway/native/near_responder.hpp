// `RequestOrder` and `NearResponder`, as `request_order.py` and `near_responder.py`.
#pragma once
#include <array>
#include <initializer_list>

#include "queue.hpp"
#include "roce_view.hpp"

namespace isthmus {

enum class Place { NEXT, BEHIND, AHEAD, ELSEWHERE };

class RequestOrder {
  public:
    int64_t first_expected() const { return expected_[0]; }
    bool has_begun() const { return num_expected_ != 0; }
    bool is_next(int64_t psn) const {
        for (int place = 0; place < num_expected_; ++place)
            if (expected_[place] == psn) return true;
        return !num_expected_;
    }
    Place place(int64_t psn) const {
        if (is_next(psn)) return Place::NEXT;
        const int64_t distance = psn_distance(expected_[0], psn);
        if (distance > 1 << 15 || distance < -(1 << 15)) return Place::ELSEWHERE;
        return distance < 0 ? Place::BEHIND : Place::AHEAD;
    }
    int64_t take(const RoceView &view) {
        if (is_in(FIRSTS | MIDDLES, view.opcode)) mtu_bytes_ = view.num_payload_bytes;
        if (rewound_from_ && psn_distance(*rewound_from_, view.psn) >= 0) rewound_from_.reset();
        if (view.opcode != READ_REQUEST) {
            expect({view.psn + 1});
            return view.psn;
        }
        const Spans found = spans(view);
        num_expected_ = found.count;
        for (int at = 0; at < found.count; ++at) expected_[at] = (view.psn + found.spans[at]) % PSN_SPAN;
        return (view.psn + found.spans[0] - 1) % PSN_SPAN;
    }
    int64_t last_psn(const RoceView &view) const { return (view.psn + spans(view).spans[0] - 1) % PSN_SPAN; }
    void begin(int64_t first_psn, int64_t mtu_bytes) {
        num_expected_ = 1, expected_[0] = first_psn, mtu_bytes_ = mtu_bytes;
    }
    void rewind(int64_t psn) {
        if (!rewound_from_) rewound_from_ = first_expected();
        expect({psn});
    }
    bool skip(int64_t psn) {
        if (!rewound_from_ || psn_distance(psn, *rewound_from_) <= 0 || psn_distance(first_expected(), psn) < 0)
            return false;
        expect({psn + 1});
        return true;
    }

  private:
    struct Spans {
        std::array<int64_t, 5> spans{};
        int count = 0;
    };
    void expect(std::initializer_list<int64_t> psns) {
        num_expected_ = 0;
        for (const int64_t psn : psns) expected_[num_expected_++] = psn % PSN_SPAN;
    }
    Spans spans(const RoceView &view) const {
        Spans found;
        if (view.opcode != READ_REQUEST) {
            found.spans[0] = 1, found.count = 1;
            return found;
        }
        const bool is_known = mtu_bytes_ >= 256 && mtu_bytes_ <= 4096 && (mtu_bytes_ & (mtu_bytes_ - 1)) == 0;
        for (int64_t mtu = is_known ? mtu_bytes_ : 4096; mtu >= (is_known ? mtu_bytes_ : 256); mtu /= 2) {
            const int64_t span = std::max<int64_t>(1, (view.read_bytes() + mtu - 1) / mtu);
            if (!found.count || found.spans[found.count - 1] != span) found.spans[found.count++] = span;
        }
        return found;
    }

    std::array<int64_t, 5> expected_{};
    int num_expected_ = 0;
    int64_t mtu_bytes_ = -1;
    std::optional<int64_t> rewound_from_;
};

constexpr uint8_t ACK = 0x1F, RNR_FIRST = 0x20, RNR_LAST = 0x3F, NAK_SEQUENCE = 0x60, NAK_OPERATION = 0x63;

// Makes a `ReplyTemplate` of Python: once a flow, so it is not written twice.
class ReplyTemplate {
  public:
    explicit operator bool() const { return bool(head_); }
    void make(PyObject *kind, const Object &genuine) {
        const Object made = Object::stolen(PyObject_CallOneArg(kind, genuine.get()));
        head_ = made.attribute("head");
        head_crc_ = uint32_t(made.attribute("head_crc").as_int());
        cnp = made.attribute("cnp");
    }
    Object acknowledge(int64_t psn, int64_t message, uint8_t syndrome = ACK) const {
        const size_t size = size_t(PyBytes_GET_SIZE(head_.get()));
        Object found = Object::stolen(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(size + 12)));
        uint8_t *at = reinterpret_cast<uint8_t *>(PyBytes_AS_STRING(found.get()));
        std::memcpy(at, data_of(head_.get()), size);
        write_u32(at + size, uint32_t(psn));
        write_u32(at + size + 4, uint32_t(syndrome) << 24 | uint32_t(message));
        const uint32_t crc = crc32(at + size, 8, head_crc_);
        for (int place = 0; place < 4; ++place) at[size + 8 + size_t(place)] = uint8_t(crc >> 8 * place);
        return found;
    }
    Object cnp;

  private:
    Object head_;
    uint32_t head_crc_ = 0;
};

class NearResponder {
  public:
    bool is_on = false;
    ReplyTemplate reply;
    std::optional<int64_t> acked, first;

    bool is_active() const { return is_on && can_answer(); }
    bool can_answer() const { return reply && offset_; }
    void begin(int64_t first_psn) { first = first_psn, offset_ = 0; }

    Object taken(const RoceView &view, int64_t last_psn) {
        if (!first) first = view.psn;
        told_gap_.reset();
        if (is_in(MESSAGE_ENDS, view.opcode)) {
            history_.push_back({last_psn, ++num_messages_});
            if (history_.size() > 1 << 16 || (offset_ && history_.size() > 64)) history_.pop_front();
        }
        if (is_in(READS_AND_ATOMICS, view.opcode)) {
            waiting_.push_back({last_psn, {}});
            return {};
        }
        const Covered latest{view.psn, num_messages_};
        if (!waiting_.empty()) {
            waiting_.back().latest = latest;
            return {};
        }
        latest_ = latest;
        ++num_unacknowledged_;
        return is_active() && (view.wants_ack || num_unacknowledged_ >= 16) ? acknowledge() : Object();
    }
    // Whether the near NIC still needs an answer, and what follows it. The template is there.
    std::pair<bool, Object> genuine(const RoceView &view) {
        const bool is_ack = view.opcode == ACKNOWLEDGE, is_nak = is_ack && view.syndrome() >= RNR_FIRST;
        const int64_t psn = answered_psn(view);
        bool is_needed = true, is_ready = false;
        if (is_ack && !is_nak) {
            learn_messages(view);
            is_needed = !covers(psn);
        }
        if (is_ack || is_in(LAST_RESPONSES, view.opcode)) {
            while (!waiting_.empty() && psn_distance(waiting_.front().last_psn, psn) >= 0) {
                if (waiting_.front().latest) latest_ = waiting_.front().latest;
                waiting_.pop_front();
                is_ready = true;
            }
            if (!covers(psn)) {
                acked = psn;
                if (is_ack) acked_messages_ = view.message();
            }
        }
        return {is_needed, (is_ready || !is_needed) && is_active() ? acknowledge() : Object()};
    }
    static int64_t answered_psn(const RoceView &view) {
        return (view.psn - (view.opcode == ACKNOWLEDGE && view.syndrome() >= RNR_FIRST)) & (PSN_SPAN - 1);
    }
    void skip() {
        offset_.reset();
        told_gap_.reset();
    }
    Object again() const { return acked && can_answer() ? reply.acknowledge(*acked, acked_messages_) : Object(); }
    Object gap(int64_t expected) {
        if (!is_active() || !waiting_.empty() || told_gap_ == expected) return {};
        told_gap_ = expected, acked = (expected - 1) & (PSN_SPAN - 1);
        acked_messages_ = messages(num_messages_);
        return reply.acknowledge(expected, acked_messages_, NAK_SEQUENCE);
    }
    Object refuse(int64_t psn) const {
        return reply ? reply.acknowledge(psn, messages(num_messages_), NAK_OPERATION) : Object();
    }
    void rewind(int64_t psn) {
        if (first && psn_distance(*first, psn) < 0) first.reset();
        while (!history_.empty() && psn_distance(psn, history_.back().psn) >= 0) history_.pop_back();
        while (!waiting_.empty() && psn_distance(psn, waiting_.back().last_psn) >= 0) waiting_.pop_back();
        if (!offset_) num_messages_ = history_.empty() ? 0 : history_.back().count;
    }
    void read_again(int64_t psn, int64_t last_psn) {
        waiting_.push_front({last_psn, latest_});
        latest_.reset();
        acked = (psn - 1) & (PSN_SPAN - 1);
        for (auto one = history_.rbegin(); one != history_.rend(); ++one)
            if (psn_distance(one->psn, *acked) >= 0) {
                acked_messages_ = messages(one->count);
                break;
            }
    }
    bool covers(int64_t psn) const { return acked && psn_distance(psn, *acked) >= 0; }

  private:
    struct Covered {
        int64_t psn, count;
    };
    struct Waiting {
        int64_t last_psn;
        std::optional<Covered> latest;
    };
    Object acknowledge() {
        if (!latest_ || !reply || covers(latest_->psn)) return {};
        acked = latest_->psn, acked_messages_ = messages(latest_->count);
        num_unacknowledged_ = 0;
        return reply.acknowledge(*acked, acked_messages_);
    }
    int64_t messages(int64_t count) const { return (count + offset_.value_or(0)) % PSN_SPAN; }
    void learn_messages(const RoceView &view) {
        if (offset_ || !first || psn_distance(*first, view.psn) < 0) return;
        int64_t count = 0;
        for (const Covered &one : history_) {
            if (psn_distance(one.psn, view.psn) < 0) break;
            count = one.count;
        }
        offset_ = (view.message() - count) & (PSN_SPAN - 1);
        while (history_.size() > 64) history_.pop_front();
    }

    int64_t num_messages_ = 0, acked_messages_ = 0, num_unacknowledged_ = 0;
    std::optional<int64_t> offset_, told_gap_;
    Queue<Covered> history_;
    Queue<Waiting> waiting_;
    std::optional<Covered> latest_;
};

}  // namespace isthmus
