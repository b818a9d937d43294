// `OutgoingSide`, as `outgoing_side.py`.
#pragma once
#include "link.hpp"

namespace isthmus {

class OutgoingSide {
  public:
    using Flow = std::shared_ptr<OutgoingFlow>;
    OutgoingSide(const Settings &settings, LinkState &link, QueuePairs &pairs, const Connections &connections)
        : held{settings.max_total_bytes}, settings_(settings), link_(link), pairs_(pairs), connections_(connections),
          burst_bytes_(std::max(16384.0, settings.link_bytes_per_s * BURST_S)), allowance_bytes_(burst_bytes_) {}
    HeldBytes held;
    int64_t num_refused = 0, num_sent = 0, num_sent_again = 0, num_taken = 0, num_absorbed = 0, num_notified = 0;
    std::vector<Flow> failed;

    size_t size() const { return flows_.size(); }
    Flow flow(const Key &key) const { return flows_.find(key); }

    double next_s(double now_s) {
        if (ready_.empty() || !link_.is_known()) return timers_.next_s();
        const double wait_s =
            allowance_bytes_ <= 0 ? std::max(0.0, -allowance_bytes_ / settings_.link_bytes_per_s) : 0.0;
        return std::min(timers_.next_s(), std::max(now_s, filled_s_ + wait_s + 1e-6));
    }

    // From the NIC

    void take(const RoceView &view, double now_s, Instructions &out) {
        Flow flow = flows_.find(view.key);
        if (!flow) flow = open(view, now_s);
        if (!flow) {
            ++num_refused;
            return;
        }
        const bool is_request = is_in(REQUESTS, view.opcode);
        if (is_request && !flow->order.is_next(view.psn)) {
            take_misplaced(flow, view, now_s, out);
        } else if (flow->failed) {
            if (is_request) refuse(*flow, view.psn, out);
        } else if (!flow->has_room(view.size())) {
            ++num_refused;
            notify(*flow, now_s, out);
        } else {
            accept(flow, view, now_s, out, is_request);
        }
    }
    void begin_anew(const Key &key) {
        if (const Flow flow = flows_.find(key)) close(flow);
    }

    // From the far gateway

    void feedback(const Feedback &entry, double now_s, Instructions &out) {
        const Flow flow = flows_.find(entry.flow);
        if (!flow || flow->failed) return;
        const auto [sample_s, tries] = flow->take_feedback(entry, now_s, link_.least_round_trip_s);
        if (sample_s) link_.sample(*sample_s);
        const bool is_new = entry.queue_pair != NO_QUEUE_PAIR && !flow->is_paired;
        if (is_new && !pairs_.is_shared(flow->key, flow->source_port))
            flow->is_paired = pairs_.join(flow->key, flow->key.reversed(entry.queue_pair & 0xFFFFFF));
        if (double(entry.held_bytes) > settings_.queue_mark_bytes || flow->rate_bytes_per_s < NEVER)
            flow->adapt_rate(entry, settings_.queue_mark_bytes, settings_.link_bytes_per_s);
        if (tries >= settings_.max_tries) fail(flow, Failure::LINK, out);
        else if (flow->can_send()) make_ready(flow);
    }
    bool answered(const Key &key, const RoceView &view, Instructions &out) {
        const Flow flow = flows_.find(key);
        if (!flow) return true;
        NearResponder &responder = flow->responder;
        const bool is_error = view.opcode == ACKNOWLEDGE && view.syndrome() > 0x60;
        if (is_error && !flow->failed && responder.covers(view.psn)) {
            fail(flow, Failure::REFUSED, out);
            return false;
        }
        if (flow->order.skip(responder.answered_psn(view))) responder.skip();
        if (!responder.reply) connections_.make_reply(responder.reply, view);
        const auto [is_needed, follows] = responder.genuine(view);
        if (is_needed) out.send_to_nic(view.frame);
        if (follows && !flow->failed) out.send_to_nic(follows);
        return false;
    }
    void failed_there(uint32_t number, Failure reason, Instructions &out) {
        const Flow flow = flows_.find(number);
        if (flow && !flow->failed) fail(flow, reason, out, false);
    }
    void fail(const Flow &flow, Failure reason, Instructions &out, bool tells = true) {
        if (flow->failed) return;
        flow->failed = reason;
        flow->clear();
        if (flow->order.has_begun()) {
            const std::optional<int64_t> acked = flow->responder.acked;
            refuse(*flow, (acked ? *acked + 1 : flow->order.first_expected() - 1) & (PSN_SPAN - 1), out);
        }
        out.queue_pair_failed(flow->key, reason);
        if (tells && link_.is_known())
            out.send_list(Kind::FAILED, link_.origin, {packed_failure(flow->flow, true, reason)});
        failed.push_back(flow);
    }
    void begin_again(double now_s) {
        flows_.forget_numbers();
        for (const Flow &flow : flows_.all()) {
            flow->begin_again(take_number());
            flows_.name(flow);
            if (flow->can_send()) make_ready(flow);
        }
        allowance_bytes_ = burst_bytes_, filled_s_ = now_s;
    }

    // Time

    void tick(double now_s, Instructions &out) {
        std::vector<std::string> probes, forgotten;
        for (const Flow &flow : timers_.pop_due(now_s)) {
            if (!flow->is_open) continue;
            if (flow->is_done() && now_s - flow->used_s >= settings_.idle_s) {
                forgotten.push_back(packed({flow->flow}));
                close(flow);
                continue;
            }
            if (flow->can_send()) make_ready(flow);
            if (!flow->failed && link_.is_known() && flow->awaits_feedback()) check_silence(flow, now_s, out, probes);
            timers_.set(flow, due_s(*flow, now_s));
        }
        if (!link_.is_known()) return;
        if (!probes.empty()) out.send_list(Kind::PROBE, link_.origin, probes);
        if (!forgotten.empty()) out.send_list(Kind::FORGET, link_.origin, forgotten);
    }
    void pump(double now_s, Instructions &out) {
        if (ready_.empty() || !link_.is_known()) return;
        double allowance =
            std::min(burst_bytes_, allowance_bytes_ + (now_s - filled_s_) * settings_.link_bytes_per_s);
        filled_s_ = now_s;
        const int64_t overhead = int64_t(DATA_BYTES) + settings_.datagram_overhead_bytes;
        uint8_t heads[2][HEAD_BYTES];
        for (const bool is_shared : {false, true}) link_.origin.write_head(heads[is_shared], Kind::DATA, is_shared);
        while (!ready_.empty() && allowance > 0) {
            const Flow flow = std::move(ready_.front());
            ready_.pop_front();
            flow->is_ready = false;
            if (now_s < flow->due_s) {
                timers_.set(flow, flow->due_s);
                continue;
            }
            const uint8_t *head = heads[pairs_.is_shared(flow->key, flow->source_port)];
            const double most = std::min(allowance, 4096.0);
            int64_t turn_bytes = 0;
            while (double(turn_bytes) < most) {
                const auto next = flow->next_frame(now_s);
                if (!next) break;
                ++num_sent;
                num_sent_again += next->is_again;
                out.send_data(head, flow->flow, uint32_t(next->number), *next->frame);
                turn_bytes += PyBytes_GET_SIZE(next->frame->get()) + overhead;
            }
            if (!turn_bytes) continue;
            allowance -= double(turn_bytes);
            if (flow->rate_bytes_per_s < NEVER)
                flow->due_s = std::max(flow->due_s, now_s - BURST_S) + double(turn_bytes) / flow->rate_bytes_per_s;
            timers_.set(flow, now_s + link_.timeout_s());
            if (flow->can_send()) make_ready(flow);
        }
        allowance_bytes_ = allowance;
    }

  private:
    static constexpr double BURST_S = 1e-3, REUSE_QUIET_S = 1.0, DRAIN_S = 20e-3;

    void accept(const Flow &flow, const RoceView &view, double now_s, Instructions &out, bool is_request) {
        ++num_taken;
        flow->used_s = now_s;
        if (is_request) {
            flow->starts_ahead = {-1, 0};
            const int64_t last_psn = flow->order.take(view);
            if (const Object answer = flow->responder.taken(view, last_psn)) out.send_to_nic(answer);
        }
        flow->add(view.frame);
        make_ready(flow);
        const double share = settings_.queue_mark_bytes / double(std::max<size_t>(ready_.size(), 1));
        if (view.has_congestion_mark() || double(flow->unsent_bytes) > share) notify(*flow, now_s, out);
    }
    void take_misplaced(const Flow &flow, const RoceView &view, double now_s, Instructions &out) {
        const Place place = flow->order.place(view.psn);
        if (is_in(STARTS, view.opcode) && begins_again(*flow, view, place, now_s)) {
            ++num_absorbed;
            close(flow);
            take(view, now_s, out);
        } else if (flow->failed) {
            refuse(*flow, view.psn, out);
        } else if (place == Place::BEHIND) {
            take_resend(flow, view, now_s, out);
        } else if (place == Place::AHEAD) {
            if (const Object answer = flow->responder.gap(flow->order.first_expected())) out.send_to_nic(answer);
        }
    }
    static bool begins_again(OutgoingFlow &flow, const RoceView &view, Place place, double now_s) {
        if (place == Place::ELSEWHERE) return true;
        const bool is_quiet = now_s - flow.used_s >= REUSE_QUIET_S;
        if (place == Place::BEHIND) return (flow.is_done() || flow.failed) && is_quiet;
        const auto [number, count] = flow.starts_ahead;
        flow.starts_ahead = {view.psn, number == view.psn ? count + 1 : 1};
        return flow.starts_ahead.second >= 5 && is_quiet;
    }
    void take_resend(const Flow &flow, const RoceView &view, double now_s, Instructions &out) {
        NearResponder &responder = flow->responder;
        const bool is_read = is_in(READS_AND_ATOMICS, view.opcode), is_covered = responder.covers(view.psn);
        if (is_read && (is_covered || now_s - flow->read_again_s > link_.timeout_s())) {
            if (flow->has_room(view.size())) {  // the response is lost; only the far NIC can make it again
                flow->read_again_s = now_s;
                if (is_covered) responder.read_again(view.psn, flow->order.last_psn(view));
                flow->add(view.frame);
                make_ready(flow);
            }
        } else if (is_covered) {
            if (const Object answer = responder.again()) out.send_to_nic(answer);
        } else if (may_be_lost(*flow, view.psn, now_s) && flow->has_room(view.size())) {
            flow->rewound_s = now_s;
            flow->order.rewind(view.psn);
            responder.rewind(view.psn);
            accept(flow, view, now_s, out, true);
            return;
        }
        ++num_absorbed;
    }
    bool may_be_lost(const OutgoingFlow &flow, int64_t psn, double now_s) const {
        const NearResponder &responder = flow.responder;
        if (responder.first && psn_distance(*responder.first, psn) < 0 && !responder.acked) return true;
        return !flow.is_paired && now_s - flow.rewound_s > link_.timeout_s();
    }
    Flow open(const RoceView &view, double now_s) {
        if (int64_t(flows_.size()) >= settings_.max_queue_pairs && !evict_idle(now_s)) return nullptr;
        const Flow flow = std::make_shared<OutgoingFlow>(take_number(), view, settings_, held);
        flows_.add(flow);
        flow->used_s = now_s;
        timers_.set(flow, now_s + settings_.idle_s);
        pairs_.enter(flow->key, flow->source_port);
        if (const auto found = connections_.take(flow->key)) {
            pairs_.join(flow->key, found->back);
            flow->order.begin(found->first_psn, found->mtu_bytes);
            connections_.make_reply(flow->responder.reply, view, &*found);
            flow->responder.begin(found->first_psn);
        }
        flow->is_paired = pairs_.incoming_of(flow->key) != nullptr;
        return flow;
    }
    uint32_t take_number() {
        const uint32_t found = next_flow_;
        next_flow_ = found % 0xFFFFFFFF + 1;
        return found;
    }
    bool evict_idle(double now_s) {
        int looked = 0;
        for (const Flow &flow : flows_.all()) {
            if (looked++ == 64) return false;
            if (flow->is_done() && now_s - flow->used_s >= REUSE_QUIET_S) {
                close(Flow(flow));
                return true;
            }
        }
        return false;
    }
    void close(const Flow &flow) {
        flow->clear();
        pairs_.part_outgoing(flow->key);
        pairs_.leave(flow->key, flow->source_port);
        flows_.remove(flow);
    }
    void notify(OutgoingFlow &flow, double now_s, Instructions &out) {
        const double spent_s = now_s - flow.notified_s;
        if (!flow.responder.reply || spent_s < settings_.near_notify_interval_s) return;
        const double before = double(flow.notified_bytes);
        const double excess = std::max(0.0, before - settings_.queue_mark_bytes);
        const double most = before - excess * -std::expm1(-spent_s / DRAIN_S);
        flow.notified_s = now_s, flow.notified_bytes = flow.queue_bytes();
        if (excess == 0 || double(flow.notified_bytes) > most) {
            ++num_notified;
            out.send_to_nic(flow.responder.reply.cnp);
        }
    }
    static void refuse(const OutgoingFlow &flow, int64_t psn, Instructions &out) {
        if (const Object answer = flow.responder.refuse(psn)) out.send_to_nic(answer);
    }
    void check_silence(const Flow &flow, double now_s, Instructions &out, std::vector<std::string> &probes) {
        if (now_s < flow->silent_s(link_.timeout_s())) return;
        ++flow->num_silent;
        flow->probed_s = now_s;
        if (flow->num_silent > settings_.max_tries) {
            fail(flow, Failure::LINK, out);
        } else if (flow->oldest_sent_s()) {
            if (flow->send_oldest_again() >= settings_.max_tries) fail(flow, Failure::LINK, out);
            else make_ready(flow);
        } else {
            probes.push_back(packed({flow->flow}));
        }
    }
    double due_s(OutgoingFlow &flow, double now_s) {
        const double least_s = now_s + 1e-3;
        if (flow.failed || !flow.awaits_feedback()) return std::max(least_s, flow.used_s + settings_.idle_s);
        return std::max(least_s, flow.silent_s(link_.timeout_s()));
    }
    void make_ready(const Flow &flow) {
        if (!flow->is_ready) {
            flow->is_ready = true;
            ready_.push_back(flow);
        }
    }

    const Settings &settings_;
    LinkState &link_;
    QueuePairs &pairs_;
    const Connections &connections_;
    FlowTable<OutgoingFlow> flows_;
    Queue<Flow> ready_;
    TimerHeap<OutgoingFlow> timers_;
    uint32_t next_flow_ = 1;
    double burst_bytes_, allowance_bytes_, filled_s_ = 0.0;
};

}  // namespace isthmus
