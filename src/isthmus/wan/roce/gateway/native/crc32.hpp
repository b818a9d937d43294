// `crc32`: as `zlib.crc32`, by carry-less multiplication where the processor has it.
//
// Source: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009: 64
// bytes are folded into the next 64 until 16 are left, which a table reduces.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace isthmus {

using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

inline const CrcTables &crc_tables() {
    static const CrcTables found = [] {
        CrcTables tables{};
        for (uint32_t byte = 0; byte < 256; ++byte) {
            uint32_t value = byte;
            for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xEDB88320u : 0);
            tables[0][byte] = value;
        }
        for (size_t row = 1; row < 8; ++row)
            for (size_t byte = 0; byte < 256; ++byte)
                tables[row][byte] = tables[row - 1][byte] >> 8 ^ tables[0][tables[row - 1][byte] & 255];
        return tables;
    }();
    return found;
}

// `state` is the inverted CRC.
inline uint32_t crc_by_table(const uint8_t *data, size_t size, uint32_t state) {
    const CrcTables &table = crc_tables();
    for (; size >= 8; data += 8, size -= 8) {
        uint32_t low, high;
        std::memcpy(&low, data, 4);
        std::memcpy(&high, data + 4, 4);
        low ^= state;
        state = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
                table[3][high & 255] ^ table[2][high >> 8 & 255] ^ table[1][high >> 16 & 255] ^ table[0][high >> 24];
    }
    for (; size; ++data, --size) state = state >> 8 ^ table[0][(state ^ *data) & 255];
    return state;
}

#if defined(__x86_64__)
__attribute__((target("pclmul,sse2"))) inline __m128i fold(__m128i kept, __m128i factors, __m128i next) {
    return _mm_xor_si128(
        _mm_xor_si128(_mm_clmulepi64_si128(kept, factors, 0x00), _mm_clmulepi64_si128(kept, factors, 0x11)), next);
}

__attribute__((target("pclmul,sse2"))) inline uint32_t crc_by_folding(const uint8_t *data, size_t size,
                                                                     uint32_t state) {
    const auto load = [](const uint8_t *at) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(at)); };
    const __m128i by_64 = _mm_set_epi64x(0x1C6E41596, 0x154442BD4), by_16 = _mm_set_epi64x(0x0CCAA009E, 0x1751997D0);
    __m128i kept[4];
    for (int place = 0; place < 4; ++place) kept[place] = load(data + 16 * place);
    kept[0] = _mm_xor_si128(kept[0], _mm_cvtsi32_si128(int(state)));
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64)
        for (int place = 0; place < 4; ++place) kept[place] = fold(kept[place], by_64, load(data + 16 * place));
    __m128i last = kept[0];
    for (int place = 1; place < 4; ++place) last = fold(last, by_16, kept[place]);
    for (; size >= 16; data += 16, size -= 16) last = fold(last, by_16, load(data));
    uint8_t rest[16];
    _mm_storeu_si128(reinterpret_cast<__m128i *>(rest), last);
    return crc_by_table(data, size, crc_by_table(rest, 16, 0));
}
#endif

inline uint32_t crc32(const uint8_t *data, size_t size, uint32_t before = 0) {
#if defined(__x86_64__)
    static const bool has_folding = __builtin_cpu_supports("pclmul");
    if (has_folding && size >= 64) return ~crc_by_folding(data, size, ~before);
#endif
    return ~crc_by_table(data, size, ~before);
}

}  // namespace isthmus
