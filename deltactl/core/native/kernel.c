/* The inner loops over elements, where numpy would make one pass over memory for each operation.
 *
 * Each function does what the numpy code of the same purpose in deltactl/codec does, bit for bit;
 * the tests run both. Plain C11 without Python's headers, called through ctypes, which lets go of
 * the interpreter lock. Elements are little-endian and need not be aligned. No function reads or
 * writes outside what its caller names by pointer and count; callers check counts and positions.
 */
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

typedef uint16_t __attribute__((aligned(1), may_alias)) u16;
typedef uint32_t __attribute__((aligned(1), may_alias)) u32;
typedef uint64_t __attribute__((aligned(1), may_alias)) u64;
typedef uint8_t u8;

/* Raised whenever a signature changes: an old build beside new code is not used. */
int deltactl_kernel_version(void) { return 5; }

static inline uint64_t mix64(uint64_t index, uint64_t bits) {
    uint64_t z = index * 0x9E3779B97F4A7C15u + bits;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* The lowest bits of eight bytes, as the bits of one. */
static inline u8 gather_eight(uint64_t bytes) {
    return (u8)(((bytes & 0x0101010101010101u) * 0x0102040810204080u) >> 56);
}

/* 64 flags of one byte, 0 or 1, as 64 bits. */
static inline uint64_t gather_flags(const u8 *flags) {
    uint64_t mask = 0;
    for (int j = 0; j < 8; j++) {
        uint64_t eight;
        memcpy(&eight, flags + 8 * j, 8);
        mask |= (uint64_t)gather_eight(eight) << (8 * j);
    }
    return mask;
}

/* Which of 64 elements differ, as 64 bits. */
#define DIFFER(W, T)                                                                               \
    static inline uint64_t differ_##W(const T *old, const T *new) {                                \
        u8 flags[64];                                                                              \
        for (int i = 0; i < 64; i++) flags[i] = old[i] != new[i];                                  \
        return gather_flags(flags);                                                                \
    }
DIFFER(1, u8)
DIFFER(4, u32)
DIFFER(8, u64)
#ifdef __SSE2__
static inline __m128i same_2(const u16 *old, const u16 *new) {
    return _mm_cmpeq_epi16(_mm_loadu_si128((const __m128i *)old),
                           _mm_loadu_si128((const __m128i *)new));
}

static inline uint64_t differ_2(const u16 *old, const u16 *new) {
    uint64_t same = 0;
    for (int i = 0; i < 64; i += 16) {
        __m128i bytes = _mm_packs_epi16(same_2(old + i, new + i), same_2(old + i + 8, new + i + 8));
        same |= (uint64_t)(uint32_t)_mm_movemask_epi8(bytes) << i;
    }
    return ~same;
}
#else
DIFFER(2, u16)
#endif

/* Positions from `first` on at which old and new differ, the bits there, and both touch sums, of
 * elements whose index in the tensor is `index` on. Returns how many; the outputs hold n. */
#define COMPARE(W, T)                                                                              \
    FAST int64_t deltactl_compare_##W(const T *old, const T *new, int64_t n, int64_t first,        \
                                      uint64_t index, int64_t *positions, T *before, T *after,     \
                                      uint64_t *sums) {                                            \
        int64_t count = 0;                                                                         \
        uint64_t old_sum = 0, new_sum = 0;                                                         \
        for (int64_t at = 0; at < n; at += 64) {                                                   \
            uint64_t mask = 0;                                                                     \
            if (n - at >= 64) {                                                                    \
                mask = differ_##W(old + at, new + at);                                             \
            } else {                                                                               \
                for (int i = 0; i < n - at; i++) mask |= (uint64_t)(old[at + i] != new[at + i]) << i; \
            }                                                                                      \
            for (; mask; mask &= mask - 1) {                                                       \
                int64_t i = at + __builtin_ctzll(mask);                                            \
                positions[count] = first + i;                                                      \
                before[count] = old[i];                                                            \
                after[count++] = new[i];                                                           \
                old_sum += mix64(index + (uint64_t)i, old[i]);                                     \
                new_sum += mix64(index + (uint64_t)i, new[i]);                                     \
            }                                                                                      \
        }                                                                                          \
        sums[0] = old_sum;                                                                         \
        sums[1] = new_sum;                                                                         \
        return count;                                                                              \
    }
COMPARE(1, u8)
COMPARE(2, u16)
COMPARE(4, u32)
COMPARE(8, u64)

/* The touch sum of bits at rising positions, whose index in the tensor is `index` more. */
#define TOUCH_SUM(W, T)                                                                            \
    uint64_t deltactl_touch_sum_##W(const int64_t *positions, const T *bits, int64_t n,            \
                                    uint64_t index) {                                              \
        uint64_t sum = 0;                                                                          \
        for (int64_t i = 0; i < n; i++) sum += mix64(index + (uint64_t)positions[i], bits[i]);     \
        return sum;                                                                                \
    }
TOUCH_SUM(1, u8)
TOUCH_SUM(2, u16)
TOUCH_SUM(4, u32)
TOUCH_SUM(8, u64)

/* Bits to integers that rise with the value, and back; see bits.py. `is_float` is all ones for
 * types with a sign bit and zero for integers. Without branches: signs are as good as random. */
#define TOP(W, T) ((T)((T)1 << (8 * W - 1)))
#define NEGATIVE(W, T, x) ((T)(0 - ((x) >> (8 * W - 1))))
#define ORDERED(W, T, x, is_float) ((T)((x) ^ ((NEGATIVE(W, T, x) | TOP(W, T)) & (is_float))))
#define UNORDERED(W, T, x, is_float)                                                               \
    ((T)((x) ^ (((T)~NEGATIVE(W, T, x) | TOP(W, T)) & (is_float))))

/* Steps in units in the last place: one bit each in `down`, ceil(n / 8) bytes, how far beyond one
 * unit in `beyond`, and the places of those that are longer than one unit in `longer`, which holds
 * n. A step is never 0. Returns how many are longer. */
#define STEPS(W, T)                                                                                \
    int64_t deltactl_steps_##W(const T *before, const T *after, int64_t n, int sign_magnitude,     \
                               u8 *down, T *beyond, int64_t *longer) {                             \
        const T is_float = (T)(0 - (T)(sign_magnitude != 0));                                      \
        int64_t count = 0;                                                                         \
        for (int64_t at = 0; at < n; at += 8) {                                                    \
            unsigned byte = 0;                                                                     \
            int64_t stop = n - at < 8 ? n : at + 8;                                                \
            for (int64_t i = at; i < stop; i++) {                                                  \
                T a = before[i], b = after[i];                                                     \
                T step = (T)(ORDERED(W, T, b, is_float) - ORDERED(W, T, a, is_float));             \
                T is_down = (T)(step >> (8 * W - 1));                                              \
                T far = (T)(((T)(step ^ (T)(0 - is_down)) + is_down) - 1);                         \
                byte |= (unsigned)is_down << (i - at);                                             \
                beyond[i] = far;                                                                   \
                longer[count] = i;                                                                 \
                count += far != 0;                                                                 \
            }                                                                                      \
            down[at >> 3] = (u8)byte;                                                              \
        }                                                                                          \
        return count;                                                                              \
    }
STEPS(1, u8)
STEPS(2, u16)
STEPS(4, u32)
STEPS(8, u64)

/* The first of rising places that is not below `limit`. */
static inline int64_t first_from(const uint32_t *places, int64_t n, int64_t limit) {
    int64_t first = 0;
    while (n > 0) {
        int64_t half = n / 2;
        if (places[first + half] < limit) {
            first += half + 1;
            n -= half + 1;
        } else {
            n = half;
        }
    }
    return first;
}

/* Take steps, apart as above, at those of `places` that lie among the n elements from `start` on, in
 * place. Places come in runs that each rise, as many in each as `runs` says. */
#define TAKE(W, T)                                                                                 \
    void deltactl_take_steps_##W(T *elements, int64_t start, int64_t n, const uint32_t *places,    \
                                 const int64_t *runs, int64_t count, const u8 *down,               \
                                 const T *beyond, int sign_magnitude) {                            \
        const T is_float = (T)(0 - (T)(sign_magnitude != 0));                                      \
        int64_t run = 0;                                                                           \
        for (int64_t k = 0; k < count; run += runs[k++]) {                                         \
            int64_t end = run + runs[k], i = run + first_from(places + run, runs[k], start);       \
            for (; i < end && places[i] < start + n; i++) {                                        \
                T *at = elements + ((int64_t)places[i] - start);                                   \
                T far = (T)(beyond[i] + 1), is_down = (T)((down[i >> 3] >> (i & 7)) & 1);          \
                T step = (T)((T)(far ^ (T)(0 - is_down)) + is_down);                               \
                T order = (T)(ORDERED(W, T, *at, is_float) + step);                                \
                *at = UNORDERED(W, T, order, is_float);                                            \
            }                                                                                      \
        }                                                                                          \
    }
TAKE(1, u8)
TAKE(2, u16)
TAKE(4, u32)
TAKE(8, u64)

/* Rising positions to gaps: to the one before, less one; the first to -1. */
void deltactl_gaps(const int64_t *positions, int64_t n, uint32_t *gaps) {
    int64_t last = -1;
    for (int64_t i = 0; i < n; i++) {
        gaps[i] = (uint32_t)(positions[i] - last - 1);
        last = positions[i];
    }
}

/* The k low bits of values as k planes of ceil(n / 8) bytes, and what is above them as bytes, 255
 * for 255 or more. Returns how many of those are 255. See integers.py. */
FAST int64_t deltactl_split(const uint32_t *values, int64_t n, int k, u8 *planes, u8 *high) {
    int64_t stride = (n + 7) / 8, escapes = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t above = k < 32 ? values[i] >> k : 0;
        high[i] = above < 255 ? (u8)above : 255;
        escapes += above >= 255;
    }
    for (int64_t at = 0; at < stride; at++) {
        uint32_t eight[8] = {0};
        int64_t left = n - 8 * at;
        memcpy(eight, values + 8 * at, (size_t)(left < 8 ? left : 8) * sizeof *values);
        for (int low = 0; low < k; low += 8) {
            uint64_t lanes = 0; /* eight bits of each of the eight values */
            for (int j = 0; j < 8; j++) lanes |= (uint64_t)(u8)(eight[j] >> low) << (8 * j);
            for (int bit = low; bit < k && bit < low + 8; bit++)
                planes[bit * stride + at] = gather_eight(lanes >> (bit - low));
        }
    }
    return escapes;
}

/* The inverse, but for what the escapes stand for. */
FAST void deltactl_join(const u8 *planes, const u8 *high, int64_t n, int k, uint64_t *values) {
    int64_t stride = (n + 7) / 8;
    for (int64_t i = 0; i < n; i++) values[i] = (uint64_t)high[i] << k;
    for (int bit = 0; bit < k; bit++) {
        const u8 *plane = planes + bit * stride;
        for (int64_t i = 0; i < n; i++)
            values[i] |= (uint64_t)((plane[i >> 3] >> (i & 7)) & 1) << bit;
    }
}

/* Rank of each changed element in its class among the active elements before it, and how many
 * active elements each class has (256 zeroed totals). The class of an element is
 * class_of[(bits >> shift) & mask]; an element at i is active if active[i >> segment_shift] is not
 * 0. Changed elements are active. */
#define RANKS(W, T)                                                                                \
    void deltactl_class_ranks_##W(const T *bits, int64_t n, int shift, uint32_t mask,              \
                                  const u8 *class_of, const u8 *active, int segment_shift,         \
                                  const int64_t *positions, int64_t count, uint32_t *ranks,        \
                                  u8 *classes, uint32_t *totals) {                                 \
        uint32_t tables[4][256];                                                                   \
        memset(tables, 0, sizeof tables);                                                          \
        int64_t next = 0;                                                                          \
        const int64_t segment = (int64_t)1 << segment_shift;                                       \
        for (int64_t from = 0; from < n; from += segment) {                                        \
            int64_t to = from + segment < n ? from + segment : n;                                  \
            if (!active[from >> segment_shift]) continue;                                          \
            int64_t i = from;                                                                      \
            while (i < to) {                                                                       \
                int64_t stop = next < count && positions[next] < to ? positions[next] : to;        \
                for (; i + 4 <= stop; i += 4) {                                                    \
                    tables[0][class_of[(uint32_t)(bits[i] >> shift) & mask]]++;                    \
                    tables[1][class_of[(uint32_t)(bits[i + 1] >> shift) & mask]]++;                \
                    tables[2][class_of[(uint32_t)(bits[i + 2] >> shift) & mask]]++;                \
                    tables[3][class_of[(uint32_t)(bits[i + 3] >> shift) & mask]]++;                \
                }                                                                                  \
                for (; i < stop; i++) tables[0][class_of[(uint32_t)(bits[i] >> shift) & mask]]++;  \
                if (stop < to) {                                                                   \
                    u8 k = class_of[(uint32_t)(bits[i] >> shift) & mask];                          \
                    classes[next] = k;                                                             \
                    ranks[next++] = tables[0][k] + tables[1][k] + tables[2][k] + tables[3][k];     \
                    tables[0][k]++;                                                                \
                    i++;                                                                           \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        for (int k = 0; k < 256; k++)                                                              \
            totals[k] = tables[0][k] + tables[1][k] + tables[2][k] + tables[3][k];                 \
    }
RANKS(1, u8)
RANKS(2, u16)
RANKS(4, u32)
RANKS(8, u64)

/* The inverse: the ranks given, class after class, become the positions of the elements that have
 * them. Those of class k are ranks[starts[k]] up to starts[k + 1], rising. `order`, unless it is
 * NULL, holds as many, and gets the places in `ranks` of what was found by rising position. Returns
 * how many elements were found. */
#define SELECT(W, T)                                                                               \
    int64_t deltactl_class_select_##W(const T *bits, int64_t n, int shift, uint32_t mask,          \
                                      const u8 *class_of, const u8 *active, int segment_shift,     \
                                      uint32_t *ranks, const int64_t *starts, uint32_t *order) {   \
        uint32_t left[256];                                                                        \
        int64_t at[256], found = 0;                                                                \
        for (int k = 0; k < 256; k++) {                                                            \
            at[k] = starts[k];                                                                     \
            left[k] = at[k] < starts[k + 1] ? ranks[at[k]] : UINT32_MAX;                           \
        }                                                                                          \
        const int64_t segment = (int64_t)1 << segment_shift;                                       \
        for (int64_t from = 0; from < n; from += segment) {                                        \
            int64_t to = from + segment < n ? from + segment : n;                                  \
            if (!active[from >> segment_shift]) continue;                                          \
            for (int64_t i = from; i < to; i++) {                                                  \
                u8 k = class_of[(uint32_t)(bits[i] >> shift) & mask];                              \
                if (left[k]--) continue;                                                           \
                uint32_t rank = ranks[at[k]];                                                      \
                if (order) order[found] = (uint32_t)at[k];                                         \
                ranks[at[k]++] = (uint32_t)i;                                                      \
                found++;                                                                           \
                left[k] = at[k] < starts[k + 1] ? ranks[at[k]] - rank - 1 : UINT32_MAX;            \
            }                                                                                      \
        }                                                                                          \
        return found;                                                                              \
    }
SELECT(1, u8)
SELECT(2, u16)
SELECT(4, u32)
SELECT(8, u64)

/* Live weights: elements at scattered positions of large arrays. Nearly every access misses the
 * cache, so that which comes AHEAD later is asked for at once. */
#define AHEAD 32
#define BLOCK 64 /* elements whose lines the first of caches holds */
#define SOON(i, n) ((i) + AHEAD < (n) ? (i) + AHEAD : (n) - 1)

#define SCATTERED(W, T, P, I)                                                                      \
    static int holds_##W##_##P(void *to, const void *at, void *bits, int64_t n) {                  \
        const T *elements = to, *expected = bits;                                                  \
        const I *positions = at;                                                                   \
        for (int64_t first = 0; first < n; first += 1024) {                                        \
            int64_t stop = n - first < 1024 ? n : first + 1024;                                    \
            T differ = 0;                                                                          \
            for (int64_t i = first; i < stop; i++) {                                               \
                __builtin_prefetch(elements + positions[SOON(i, n)], 0);                           \
                differ |= (T)(elements[positions[i]] ^ expected[i]);                               \
            }                                                                                      \
            if (differ) return 0;                                                                  \
        }                                                                                          \
        return 1;                                                                                  \
    }                                                                                              \
    static int put_##W##_##P(void *to, const void *at, void *bits, int64_t n) {                    \
        T *elements = to;                                                                          \
        const I *positions = at;                                                                   \
        for (int64_t i = 0; i < n; i++) {                                                          \
            __builtin_prefetch(elements + positions[SOON(i, n)], 1);                               \
            elements[positions[i]] = ((const T *)bits)[i];                                         \
        }                                                                                          \
        return 1;                                                                                  \
    }                                                                                              \
    static int take_##W##_##P(void *to, const void *at, void *bits, int64_t n) {                   \
        const T *elements = to;                                                                    \
        const I *positions = at;                                                                   \
        for (int64_t i = 0; i < n; i++) {                                                          \
            __builtin_prefetch(elements + positions[SOON(i, n)], 0);                               \
            ((T *)bits)[i] = elements[positions[i]];                                               \
        }                                                                                          \
        return 1;                                                                                  \
    }                                                                                              \
    static int64_t replace_##W##_##P(void *to, const void *at, const void *before,                 \
                                     const void *after, int64_t n) {                               \
        T *elements = to;                                                                          \
        const T *old = before, *new = after;                                                       \
        const I *positions = at;                                                                   \
        for (int64_t first = 0; first < n; first += BLOCK) {                                       \
            int64_t stop = n - first < BLOCK ? n : first + BLOCK;                                  \
            T differ = 0;                                                                          \
            for (int64_t i = first; i < stop; i++)                                                 \
                differ |= (T)(elements[positions[i]] ^ old[i]);                                    \
            if (differ) return first;                                                              \
            for (int64_t i = first; i < stop; i++) {                                               \
                int64_t next = i + BLOCK < n ? i + BLOCK : n - 1;                                  \
                __builtin_prefetch(elements + positions[next], 1);                                 \
                elements[positions[i]] = new[i];                                                   \
            }                                                                                      \
            __asm__ volatile("" ::: "memory"); /* or the compiler knows what it reads */           \
            for (int64_t i = first; i < stop; i++)                                                 \
                differ |= (T)(elements[positions[i]] ^ new[i]);                                    \
            if (differ) return -1;                                                                 \
        }                                                                                          \
        return n;                                                                                  \
    }
SCATTERED(1, u8, 4, int32_t)
SCATTERED(2, u16, 4, int32_t)
SCATTERED(4, u32, 4, int32_t)
SCATTERED(8, u64, 4, int32_t)
SCATTERED(1, u8, 8, int64_t)
SCATTERED(2, u16, 8, int64_t)
SCATTERED(4, u32, 8, int64_t)
SCATTERED(8, u64, 8, int64_t)

typedef int scattered(void *elements, const void *positions, void *bits, int64_t n);
typedef int64_t replacing(void *elements, const void *positions, const void *before,
                          const void *after, int64_t n);

#define WIDTH(row) ((row)[4] == 1 ? 0 : (row)[4] == 2 ? 1 : (row)[4] == 4 ? 2 : 3)

/* Rows of six: the addresses of elements, positions and bits, how many positions, and the bytes of
 * an element (1, 2, 4 or 8) and of a position (4 or 8). Stops at the first row that gives 0. */
static int each_row(const int64_t *rows, int64_t n, scattered *const by_width[2][4]) {
    for (const int64_t *row = rows; row < rows + 6 * n; row += 6) {
        scattered *one = by_width[row[5] == 8][WIDTH(row)];
        if (!one((void *)(uintptr_t)row[0], (void *)(uintptr_t)row[1], (void *)(uintptr_t)row[2],
                 row[3]))
            return 0;
    }
    return 1;
}

#define ROWS(NAME)                                                                                 \
    int deltactl_##NAME(const int64_t *rows, int64_t n) {                                          \
        static scattered *const by_width[2][4] = {                                                 \
            {NAME##_1_4, NAME##_2_4, NAME##_4_4, NAME##_8_4},                                      \
            {NAME##_1_8, NAME##_2_8, NAME##_4_8, NAME##_8_8},                                      \
        };                                                                                         \
        return each_row(rows, n, by_width);                                                        \
    }
/* Whether the elements at the positions are the bits; elements to be the bits; the bits of them. */
ROWS(holds)
ROWS(put)
ROWS(take)

/* Rows of the bits before and, of the same positions, of those after. Block by block, so that memory
 * is gone through once: compare with those before, write those after, read them back. Returns how
 * many were replaced: fewer than all where a block, and what comes after it, was left as it is since
 * it was not as before; -1 where what was written did not read back. */
int64_t deltactl_replace(const int64_t *before, const int64_t *after, int64_t n) {
    static replacing *const by_width[2][4] = {
        {replace_1_4, replace_2_4, replace_4_4, replace_8_4},
        {replace_1_8, replace_2_8, replace_4_8, replace_8_8},
    };
    int64_t total = 0;
    for (int64_t k = 0; k < n; k++) {
        const int64_t *row = before + 6 * k;
        int64_t done = by_width[row[5] == 8][WIDTH(row)](
            (void *)(uintptr_t)row[0], (const void *)(uintptr_t)row[1],
            (const void *)(uintptr_t)row[2], (const void *)(uintptr_t)after[6 * k + 2], row[3]);
        if (done < 0) return -1;
        total += done;
        if (done < row[3]) return total;
    }
    return total;
}

/* The touch sum of a rectangle of elements: `rank` axes, at most 16, of which the last has elements
 * `strides` apart whose indices in the tensor are `steps` apart. The first one's index is `index`. */
#define RECTANGLE(W, T)                                                                            \
    uint64_t deltactl_rectangle_##W(const T *elements, int64_t rank, const int64_t *shape,         \
                                    const int64_t *strides, const int64_t *steps,                  \
                                    uint64_t index) {                                              \
        int64_t at[16] = {0}, last = rank - 1, stride = strides[last];                             \
        uint64_t sum = 0;                                                                          \
        for (;;) {                                                                                 \
            const T *element = elements;                                                           \
            uint64_t here = index;                                                                 \
            for (int64_t k = 0; k < last; k++) {                                                   \
                element += at[k] * strides[k];                                                     \
                here += (uint64_t)(at[k] * steps[k]);                                              \
            }                                                                                      \
            for (int64_t i = 0; i < shape[last]; i++)                                              \
                sum += mix64(here + (uint64_t)(i * steps[last]), element[i * stride]);             \
            int64_t k = last - 1;                                                                  \
            while (k >= 0 && ++at[k] == shape[k]) at[k--] = 0;                                     \
            if (k < 0) return sum;                                                                 \
        }                                                                                          \
    }
RECTANGLE(1, u8)
RECTANGLE(2, u16)
RECTANGLE(4, u32)
RECTANGLE(8, u64)
