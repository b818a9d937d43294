// `RoceView`: the fields of a frame that a gateway reads, as `roce_view.py`, `roce_opcodes.py` and `request_order.py`.
#pragma once
#include <cstring>
#include <optional>

#include "crc32.hpp"
#include "python_object.hpp"

namespace isthmus {

constexpr int64_t PSN_SPAN = 1 << 24;

inline int64_t psn_distance(int64_t first, int64_t second) {
    return ((second - first + PSN_SPAN / 2) & (PSN_SPAN - 1)) - PSN_SPAN / 2;
}

enum Opcode : uint8_t { READ_REQUEST = 0x0C, ACKNOWLEDGE = 0x11, DATAGRAM_SEND_ONLY = 0x64, CNP = 0x81 };

constexpr bool is_in(uint32_t set, uint8_t opcode) { return opcode < 32 && (set >> opcode & 1); }
constexpr uint32_t READS_AND_ATOMICS = 1u << 0x0C | 1u << 0x13 | 1u << 0x14;
constexpr uint32_t REQUESTS = 0xFFFu | 1u << 0x16 | 1u << 0x17 | READS_AND_ATOMICS;
constexpr uint32_t RESPONSES = 0x3Fu << 0x0D;
constexpr uint32_t LAST_RESPONSES = 1u << 0x0F | 1u << 0x10 | 1u << 0x12;
constexpr uint32_t PARTIAL_RESPONSES = 1u << 0x0D | 1u << 0x0E;
constexpr uint32_t FIRSTS = 1u << 0x00 | 1u << 0x06, MIDDLES = 1u << 0x01 | 1u << 0x07;
constexpr uint32_t STARTS = FIRSTS | READS_AND_ATOMICS | 1u << 0x04 | 1u << 0x05 | 1u << 0x0A | 1u << 0x0B | 1u << 0x17;
constexpr uint32_t MESSAGE_ENDS = 0xF3Cu | 1u << 0x16 | 1u << 0x17 | READS_AND_ATOMICS;

// Two addresses, 8 bytes of IPv4 or 32 of IPv6, and a number: a queue pair, or a UDP port.
struct Key {
    uint8_t ends[32] = {};
    uint32_t num_bytes = 0, number = 0;

    bool operator==(const Key &other) const { return std::memcmp(this, &other, sizeof(Key)) == 0; }
    Key reversed(uint32_t other_number) const {
        Key found;
        found.num_bytes = num_bytes, found.number = other_number;
        const uint32_t half = num_bytes / 2;
        std::memcpy(found.ends, ends + half, half);
        std::memcpy(found.ends + half, ends, half);
        return found;
    }
    Key with(uint32_t other_number) const {
        Key found = *this;
        found.number = other_number;
        return found;
    }
};

struct KeyHash {
    size_t operator()(const Key &key) const {
        uint64_t words[5], found = 0x9E3779B97F4A7C15u;
        std::memcpy(words, &key, sizeof words);
        for (const uint64_t word : words) found = (found ^ word) * 0xD6E8FEB86659FD93u, found ^= found >> 32;
        return found;
    }
};

struct RoceView {
    Object frame;
    Key key;
    uint32_t source_port = 0, base = 0;
    int64_t psn = 0, num_payload_bytes = 0;
    uint8_t opcode = 0;
    bool wants_ack = false;

    const uint8_t *data() const { return data_of(frame.get()); }
    int64_t size() const { return PyBytes_GET_SIZE(frame.get()); }
    uint8_t syndrome() const { return data()[base + 12]; }
    int64_t message() const { return read_u32(data() + base + 12) & 0xFFFFFF; }
    int64_t read_bytes() const { return read_u32(data() + base + 24); }
    bool has_congestion_mark() const {
        const uint8_t byte = data()[1];
        return ((base == 28 ? byte : byte >> 4) & 3) == 3;
    }
};

inline int64_t bytes_after_transport_header(uint8_t opcode) {
    switch (opcode) {
        case 0x64: return 8;
        case 0x03: case 0x05: case 0x09: case 0x16: case 0x17: case 0x0D: case 0x0F: case 0x10: case 0x11: return 4;
        case 0x06: case 0x0A: case 0x0C: return 16;
        case 0x0B: return 20;
        case 0x12: return 12;
        case 0x13: case 0x14: return 28;
        default: return 0;
    }
}

// The fields of a frame; nothing for one that is cut, forged or not RoCEv2.
inline std::optional<RoceView> view_frame(const Object &frame) {
    const uint8_t *data = data_of(frame.get());
    const int64_t size = PyBytes_GET_SIZE(frame.get());
    if (size < 44 || size > 9216) return {};
    uint8_t head[60];
    RoceView view;
    uint32_t end;
    if (data[0] == 0x45) {
        uint32_t sum = 0;
        for (int at = 0; at < 20; at += 2) sum += read_u16(data + at);
        if (data[9] != 17 || read_u16(data + 2) != size || read_u16(data + 6) & 0xBFFF || sum % 0xFFFF) return {};
        view.base = 28, end = 40;
        std::memcpy(head, data, end);
        head[1] = head[8] = head[10] = head[11] = 0xFF;
        view.key.num_bytes = 8;
        std::memcpy(view.key.ends, data + 12, 8);
    } else if (data[0] >> 4 == 6) {
        if (size < 64 || data[6] != 17 || read_u16(data + 4) != size - 40) return {};
        view.base = 48, end = 60;
        std::memcpy(head, data, end);
        head[0] |= 0x0F, head[1] = head[2] = head[3] = head[7] = 0xFF;
        view.key.num_bytes = 32;
        std::memcpy(view.key.ends, data + 8, 32);
    } else {
        return {};
    }
    const uint8_t *udp = data + view.base - 8, *transport = data + view.base;
    head[view.base - 2] = head[view.base - 1] = head[view.base + 4] = 0xFF;
    if (read_u16(udp + 2) != 4791 || read_u16(udp + 4) != size - view.base + 8) return {};
    view.opcode = transport[0];
    view.num_payload_bytes =
        size - end - 4 - bytes_after_transport_header(view.opcode) - (transport[1] >> 4 & 3);
    if (view.num_payload_bytes < 0) return {};
    static const uint32_t dummy = [] {  // the local route header that RoCE lacks, as ones
        uint8_t ones[8];
        std::memset(ones, 0xFF, 8);
        return crc32(ones, 8);
    }();
    if (crc32(data + end, size_t(size - end), crc32(head, end, dummy)) != 0x2144DF1C) return {};
    const uint32_t number = read_u32(transport + 8);
    view.key.number = read_u32(transport + 4) & 0xFFFFFF;
    view.source_port = read_u16(udp);
    view.psn = number & 0xFFFFFF;
    view.wants_ack = number > 0x7FFFFFFF;
    view.frame = frame;
    return view;
}

}  // namespace isthmus
