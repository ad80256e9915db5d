/* One pass over bf16 elements of which only a byte each, the low one of their order, and a sum for
 * each BLOCK of them is held: what half_scan.py times. Little-endian. */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

#define BLOCK 1024

/* As codec.bits.mix64; a word is four elements. */
static inline uint64_t mix64(uint64_t index, uint64_t word) {
    uint64_t z = index * 0x9E3779B97F4A7C15u + word;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* 64 flags of one byte, 0 or 1, as 64 bits. */
static inline uint64_t gather_flags(const uint8_t *flags) {
    uint64_t mask = 0;
    for (int j = 0; j < 8; j++) {
        uint64_t eight;
        memcpy(&eight, flags + 8 * j, 8);
        mask |= (eight * 0x0102040810204080u >> 56) << (8 * j);
    }
    return mask;
}

/* To integers that rise with the value, and back. */
static inline uint16_t ordered(uint16_t x) { return x & 0x8000 ? (uint16_t)~x : x | 0x8000; }
static inline uint16_t unordered(uint16_t o) { return o & 0x8000 ? o ^ 0x8000 : (uint16_t)~o; }

/* n elements from `index` on, both multiples of BLOCK, against their bytes and sums, which are
 * brought up to date. Where a byte differs: the position, the nearest element that has the byte
 * held, and the element. `unproven`: of each block, whether the sum held is not that of the elements
 * so found. Returns how many differ; the first three outputs hold n. */
FAST int64_t half_scan(const uint16_t *new, int64_t n, uint64_t index, uint8_t *held,
                       uint64_t *sums, int32_t *positions, uint16_t *before, uint16_t *after,
                       uint8_t *unproven) {
    int64_t count = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const uint16_t *block = new + start;
        uint64_t sum = 0, first = (index + (uint64_t)start) / 4, was = 0;
        for (int w = 0; w < BLOCK / 4; w++) {
            uint64_t word;
            memcpy(&word, block + 4 * w, 8);
            sum += mix64(first + (uint64_t)w, word);
        }
        for (int at = 0; at < BLOCK; at += 64) {
            uint8_t now[64], differ[64], *old = held + start + at;
            for (int i = 0; i < 64; i++) {
                uint16_t x = block[at + i];
                now[i] = (uint8_t)(x ^ (0 - (x >> 15)));
            }
            for (int i = 0; i < 64; i++) differ[i] = now[i] != old[i];
            uint64_t mask = gather_flags(differ);
            if (!mask) continue;
            while (mask) {
                int w = __builtin_ctzll(mask) & ~3;
                uint64_t word, number = first + (uint64_t)((at + w) / 4);
                memcpy(&word, block + at + w, 8);
                uint64_t guessed = word;
                for (; mask >> w & 15; mask &= mask - 1) {
                    int i = __builtin_ctzll(mask);
                    uint16_t x = block[at + i];
                    int8_t step = (int8_t)(old[i] - now[i]);
                    uint16_t guess = unordered((uint16_t)(ordered(x) + step));
                    guessed ^= (uint64_t)(uint16_t)(x ^ guess) << (16 * (i & 3));
                    positions[count] = (int32_t)(start + at + i);
                    before[count] = guess;
                    after[count++] = x;
                }
                was += mix64(number, guessed) - mix64(number, word);
            }
            memcpy(old, now, 64);
        }
        unproven[start / BLOCK] = sum + was != sums[start / BLOCK];
        sums[start / BLOCK] = sum;
    }
    return count;
}
