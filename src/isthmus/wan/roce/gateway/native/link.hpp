// What the two sides share: `LinkState`, `QueuePairs`, datagrams and instructions, as the modules of these names.
#pragma once
#include <map>
#include <set>
#include <string>
#include <unordered_set>

#include "flows.hpp"

namespace isthmus {

constexpr size_t HEAD_BYTES = 12, DATA_BYTES = 20, MAX_BODY_BYTES = 1200;
enum class Kind : uint8_t { HELLO, DATA, FEEDBACK, FAILED, PROBE, FORGET };

struct Origin {
    uint32_t from_epoch = 0, to_epoch = 0;
    bool acknowledges = false;

    void write_head(uint8_t *at, Kind kind, bool is_shared = false) const {
        at[0] = uint8_t(kind), at[1] = 1, at[2] = uint8_t(acknowledges | is_shared << 1), at[3] = 0;
        write_u32(at + 4, from_epoch);
        write_u32(at + 8, to_epoch);
    }
};

// The classes of Python that instructions, and what is made once a flow, are of.
struct Classes {
    Object nic_frame, nic_frames, link_datagram, link_datagrams, send_to_nic, send_on_link, queue_pair_failed;
    Object flow_failure, reply_template, view_frame, statistics;
};

// The instructions of one event.
class Instructions {
  public:
    explicit Instructions(const Classes &classes) : classes_(classes), list_(Object::stolen(PyList_New(0))) {}
    void send_to_nic(const Object &frame) { append(one(classes_.send_to_nic, frame)); }
    void send_on_link(const Object &data) { append(one(classes_.send_on_link, data)); }
    void send_data(const uint8_t *head, uint32_t flow, uint32_t low, const Object &frame) {
        const size_t size = size_t(PyBytes_GET_SIZE(frame.get()));
        const Object data = Object::stolen(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(DATA_BYTES + size)));
        uint8_t *at = reinterpret_cast<uint8_t *>(PyBytes_AS_STRING(data.get()));
        std::memcpy(at, head, HEAD_BYTES);
        write_u32(at + HEAD_BYTES, flow);
        write_u32(at + HEAD_BYTES + 4, low);
        std::memcpy(at + DATA_BYTES, data_of(frame.get()), size);
        send_on_link(data);
    }
    void send_list(Kind kind, const Origin &origin, const std::vector<std::string> &entries) {
        uint8_t head[HEAD_BYTES];
        origin.write_head(head, kind);
        std::string data(reinterpret_cast<char *>(head), HEAD_BYTES);
        for (const std::string &entry : entries) {
            if (data.size() - HEAD_BYTES + entry.size() > MAX_BODY_BYTES) {
                send_on_link(bytes_of(reinterpret_cast<const uint8_t *>(data.data()), data.size()));
                data.resize(HEAD_BYTES);
            }
            data += entry;
        }
        send_on_link(bytes_of(reinterpret_cast<const uint8_t *>(data.data()), data.size()));
    }
    void queue_pair_failed(const Key &key, Failure reason) {
        const Object ends = bytes_of(key.ends, key.num_bytes);
        const Object why = Object::stolen(PyObject_CallFunction(classes_.flow_failure.get(), "i", int(reason)));
        append(Object::stolen(PyObject_CallFunction(classes_.queue_pair_failed.get(), "OIO", ends.get(),
                                                    unsigned(key.number), why.get())));
    }
    Object take() { return std::move(list_); }

  private:
    static Object one(const Object &kind, const Object &value) {  // a NamedTuple of one field, without its `__new__`
        PyTypeObject *type = reinterpret_cast<PyTypeObject *>(kind.get());
        Object made = Object::stolen(type->tp_alloc(type, 1));
        Py_INCREF(value.get());
        PyTuple_SET_ITEM(made.get(), 0, value.get());
        return made;
    }
    void append(const Object &value) {
        if (PyList_Append(list_.get(), value.get()) < 0) throw PythonError();
    }

    const Classes &classes_;
    Object list_;
};

inline std::string packed(std::initializer_list<uint32_t> words) {
    std::string found;
    for (const uint32_t word : words) {
        uint8_t bytes[4];
        write_u32(bytes, word);
        found.append(reinterpret_cast<char *>(bytes), 4);
    }
    return found;
}

inline std::string packed(const Feedback &entry) {
    std::string found = packed({entry.flow, entry.low_floor, entry.low_done, entry.kilobytes_per_s, entry.held_bytes,
                                entry.queue_pair, entry.low_latest, entry.age_us});
    const size_t count = std::min(entry.missing.size(), MAX_RANGES);
    const auto add_u16 = [&found](size_t value) { found += char(value >> 8), found += char(value); };
    add_u16(count);
    for (size_t place = 0; place < count; ++place) {
        found += packed({entry.missing[place].low});
        add_u16(entry.missing[place].count);
    }
    return found;
}

inline std::string packed_failure(uint32_t flow, bool is_mine, Failure reason) {
    std::string found = packed({flow});
    found += char(is_mine), found += char(reason);
    return found;
}

// A datagram other than one with a frame.
struct ListDatagram {
    struct Failed {
        uint32_t flow;
        bool is_mine;
        Failure reason;
    };
    std::vector<Feedback> feedback;
    std::vector<Failed> failed;
    std::vector<uint32_t> flows;
};

// The body of a datagram of `kind`; nothing for one that no gateway builds.
inline std::optional<ListDatagram> parse_list(Kind kind, const uint8_t *at, size_t size) {
    ListDatagram found;
    if (size > MAX_BODY_BYTES || (kind == Kind::HELLO && size)) return {};
    if (kind == Kind::FEEDBACK) {
        while (size) {
            if (size < 34) return {};
            const size_t count = read_u16(at + 32);
            if (count > MAX_RANGES || size < 34 + 6 * count) return {};
            Feedback entry{read_u32(at), read_u32(at + 4), read_u32(at + 8), read_u32(at + 12), read_u32(at + 16),
                           read_u32(at + 20), read_u32(at + 24), read_u32(at + 28), {}};
            for (size_t place = 0; place < count; ++place)
                entry.missing.push_back({read_u32(at + 34 + 6 * place), read_u16(at + 38 + 6 * place)});
            at += 34 + 6 * count, size -= 34 + 6 * count;
            found.feedback.push_back(std::move(entry));
        }
    } else if (kind == Kind::FAILED) {
        if (size % 6) return {};
        for (; size; at += 6, size -= 6) {
            if (at[4] > 1 || at[5] > uint8_t(Failure::PEER)) return {};
            found.failed.push_back({read_u32(at), at[4] == 1, Failure(at[5])});
        }
    } else {
        if (size % 4) return {};
        for (; size; at += 4, size -= 4) found.flows.push_back(read_u32(at));
    }
    return found;
}

enum class Heard { CURRENT, NEW_PEER, IGNORED };

class LinkState {
  public:
    LinkState(uint32_t epoch, const Settings &settings)
        : least_round_trip_s(settings.round_trip_s), smooth_s_(settings.round_trip_s),
          deviation_s_(settings.round_trip_s / 2), reorder_s_(settings.reorder_s),
          margin_s_(2 * settings.feedback_interval_s + settings.reorder_s) {
        origin = {epoch, 0, settings.acknowledge_near};
    }
    Origin origin;
    bool peer_acknowledges = false;
    double hello_s = -NEVER, least_round_trip_s;

    bool is_known() const { return origin.to_epoch != 0; }
    bool is_current(const Origin &theirs) const {
        return theirs.from_epoch == origin.to_epoch && theirs.to_epoch == origin.from_epoch;
    }
    double timeout_s() const { return smooth_s_ + 4 * deviation_s_ + margin_s_; }
    double ask_again_s() const { return smooth_s_ + 4 * deviation_s_ + reorder_s_; }

    Heard hear(const Origin &theirs, double now_s, Instructions &out) {
        if (is_current(theirs)) {
            peer_acknowledges = theirs.acknowledges;
            return Heard::CURRENT;
        }
        const bool is_retired = std::find(retired_.begin(), retired_.end(), theirs.from_epoch) != retired_.end();
        if (is_retired || theirs.from_epoch == origin.from_epoch) return Heard::IGNORED;
        if (theirs.to_epoch != origin.from_epoch) {
            if (now_s - replied_s_ < 0.01) return Heard::IGNORED;
            replied_s_ = now_s;
            send_hello(theirs.from_epoch, out);
            return Heard::IGNORED;
        }
        peer_acknowledges = theirs.acknowledges;
        if (is_known()) retired_.push_back(origin.to_epoch);
        if (retired_.size() > 64) retired_.pop_front();
        origin.to_epoch = theirs.from_epoch;
        if (hello_sent_s_ && *hello_sent_s_ < NEVER) sample(now_s - *hello_sent_s_);
        hello_sent_s_ = hello_s = NEVER;
        send_hello(origin.to_epoch, out);
        return Heard::NEW_PEER;
    }
    void hello(double now_s, Instructions &out) {
        if (!is_known()) {
            hello_s = now_s + 0.1;
            hello_sent_s_ = hello_sent_s_ ? NEVER : now_s;  // of two, which one is answered?
        }
        send_hello(origin.to_epoch, out);
    }
    void sample(double round_trip_s) {
        if (!has_sample_) {
            has_sample_ = true;
            smooth_s_ = least_round_trip_s = round_trip_s;
            deviation_s_ = round_trip_s / 2;
            return;
        }
        least_round_trip_s = std::min(round_trip_s, least_round_trip_s * 1.002);
        deviation_s_ += (std::abs(round_trip_s - smooth_s_) - deviation_s_) / 4;
        smooth_s_ += (round_trip_s - smooth_s_) / 8;
    }

  private:
    void send_hello(uint32_t to_epoch, Instructions &out) {
        out.send_list(Kind::HELLO, {origin.from_epoch, to_epoch, origin.acknowledges}, {});
    }
    double replied_s_ = -NEVER;
    std::optional<double> hello_sent_s_;
    Queue<uint32_t> retired_;
    double smooth_s_, deviation_s_, reorder_s_, margin_s_;
    bool has_sample_ = false;
};

class QueuePairs {
  public:
    size_t size() const { return incoming_.size(); }
    void enter(const Key &key, uint32_t port) {
        std::set<uint32_t> &users = users_[key.with(port)];
        users.insert(key.number);
        if (users.size() > 1) shared_.insert(key.with(port)), shared_.insert(key.reversed(port));
    }
    void leave(const Key &key, uint32_t port) {
        const Key place = key.with(port), other = key.reversed(port);
        const auto users = users_.find(place);
        if (users == users_.end()) return;
        users->second.erase(key.number);
        if (!users->second.empty()) return;
        users_.erase(users);
        if (!users_.count(other)) shared_.erase(place), shared_.erase(other);
    }
    bool is_shared(const Key &key, uint32_t port) const { return !shared_.empty() && shared_.count(key.with(port)); }
    bool join(const Key &outgoing, const Key &incoming) {
        const Key *in = incoming_of(outgoing), *out = outgoing_of(incoming);
        if ((in && !(*in == incoming)) || (out && !(*out == outgoing))) return false;
        incoming_[outgoing] = incoming, outgoing_[incoming] = outgoing;
        return true;
    }
    const Key *incoming_of(const Key &outgoing) const { return find(incoming_, outgoing); }
    const Key *outgoing_of(const Key &incoming) const { return find(outgoing_, incoming); }
    void part_outgoing(const Key &outgoing) { part(incoming_, outgoing_, outgoing); }
    void part_incoming(const Key &incoming) { part(outgoing_, incoming_, incoming); }

  private:
    using Keys = std::unordered_map<Key, Key, KeyHash>;
    static const Key *find(const Keys &keys, const Key &key) {
        const auto found = keys.find(key);
        return found == keys.end() ? nullptr : &found->second;
    }
    static void part(Keys &keys, Keys &back, const Key &key) {
        const auto found = keys.find(key);
        if (found == keys.end()) return;
        back.erase(found->second);
        keys.erase(found);
    }
    Keys incoming_, outgoing_;
    std::unordered_map<Key, std::set<uint32_t>, KeyHash> users_;
    std::unordered_set<Key, KeyHash> shared_;
};

// Queue pairs that connection messages set up: Python's `Connections`, since such messages are few.
struct NewDirection {
    Key key, back;
    uint32_t sender;
    int64_t first_psn, mtu_bytes;
};

class Connections {
  public:
    Connections(const Object &connections, const Classes &classes) : connections_(connections), classes_(classes) {}
    Object python_view(const RoceView &view) const {
        return Object::stolen(PyObject_CallOneArg(classes_.view_frame.get(), view.frame.get()));
    }
    std::optional<NewDirection> take(const Key &key) const {
        const Object ends = bytes_of(key.ends, key.num_bytes);
        const Object found = Object::stolen(PyObject_CallMethod(connections_.get(), "take", "((OI))", ends.get(),
                                                                unsigned(key.number)));
        if (found.is_none()) return {};
        return direction(found);
    }
    // The direction of the REQ's sender, and the other one.
    std::optional<std::pair<NewDirection, NewDirection>> note(const RoceView &view) const {
        const Object found = Object::stolen(PyObject_CallMethod(connections_.get(), "note", "(O)", python_view(view).get()));
        if (found.is_none()) return {};
        return std::pair(direction(found.item(0)), direction(found.item(1)));
    }
    // A template of answers with the headers of `view`, or as if it came the way that `as` names.
    void make_reply(ReplyTemplate &reply, const RoceView &view, const NewDirection *as = nullptr) const {
        Object genuine = python_view(view);
        if (as != nullptr) {
            const Object method = genuine.attribute("_replace"), none = Object::stolen(PyTuple_New(0));
            const Object fields = Object::stolen(Py_BuildValue(
                "{s:y#,s:I}", "ends", reinterpret_cast<const char *>(as->back.ends), Py_ssize_t(as->back.num_bytes),
                "queue_pair", unsigned(as->sender)));
            genuine = Object::stolen(PyObject_Call(method.get(), none.get(), fields.get()));
        }
        reply.make(classes_.reply_template.get(), genuine);
    }

  private:
    static Key key_of(const Object &pair) {
        const Object ends = pair.item(0);
        Key found;
        found.num_bytes = uint32_t(std::min<Py_ssize_t>(PyBytes_GET_SIZE(ends.get()), 32));
        std::memcpy(found.ends, data_of(ends.get()), found.num_bytes);
        found.number = uint32_t(pair.item(1).as_int());
        return found;
    }
    static NewDirection direction(const Object &one) {
        return {key_of(one.attribute("key")), key_of(one.attribute("back")), uint32_t(one.attribute("sender").as_int()),
                one.attribute("first_psn").as_int(), one.attribute("mtu_bytes").as_int()};
    }
    Object connections_;
    const Classes &classes_;
};

// Flows by key and by number, in the order in which they began.
template <class Flow> class FlowTable {
  public:
    using Pointer = std::shared_ptr<Flow>;
    size_t size() const { return by_key_.size(); }
    const std::list<Pointer> &all() const { return order_; }
    Pointer find(const Key &key) const {
        const auto found = by_key_.find(key);
        return found == by_key_.end() ? nullptr : found->second;
    }
    Pointer find(uint32_t number) const {
        const auto found = by_number_.find(number);
        return found == by_number_.end() ? nullptr : found->second;
    }
    void add(const Pointer &flow) {
        by_key_[flow->key] = flow;
        flow->place = order_.insert(order_.end(), flow);
        name(flow);
    }
    void name(const Pointer &flow) { by_number_[flow->flow] = flow; }
    void forget_numbers() { by_number_.clear(); }
    // Whether the flow had a number; after a restart of the peer another one may have it.
    bool remove(const Pointer &flow) {
        flow->is_open = false;
        by_key_.erase(flow->key);
        order_.erase(flow->place);
        const auto found = by_number_.find(flow->flow);
        if (found == by_number_.end() || found->second != flow) return false;
        by_number_.erase(found);
        return true;
    }

  private:
    std::unordered_map<Key, Pointer, KeyHash> by_key_;
    std::unordered_map<uint32_t, Pointer> by_number_;
    std::list<Pointer> order_;
};

}  // namespace isthmus
