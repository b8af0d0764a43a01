/* What all bodies share: vectors of the machine, sums, exponentials, roundings.

   REAL is the wide dtype.  The order of every sum depends on its own row alone, so a row comes out the same, bit for
   bit, whatever else is in the step. */

#ifndef DEEPINFER_COMMON_H
#define DEEPINFER_COMMON_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <tgmath.h>

#ifndef REAL
#define REAL float
#endif

/* For the preprocessor, which cannot compare types: 1 of float, 0 of double. */
#define REAL_IS_float 1
#define REAL_IS_double 0
#define PASTE(a, b) a##b
#define FLOAT(real) PASTE(REAL_IS_, real)

#define INLINE static inline __attribute__((always_inline))

typedef REAL vec __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));
typedef REAL half_vec __attribute__((vector_size(32)));
typedef REAL quarter_vec __attribute__((vector_size(16)));
enum { LANES = 64 / sizeof(REAL), ROWS = 4, MOST_STREAMS = 8 };

/* Has a vector stay in a register: loaded again for each row, it would be the loads that take the time. */
#ifdef __AVX512F__
#define KEEP(vector) __asm__("" : "+v"(vector))
#else
#define KEEP(vector)
#endif

/* A loop over a few rows, unrolled before anything else, so that each row's sums get registers of their own. */
#define EACH_ROW(r) _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)

INLINE vec load(const REAL *x) { return *(const vec *)x; }

INLINE void store(REAL *x, vec value) { *(vec *)x = value; }

/* Halves are added to one another: few steps, instead of one after the other for every lane. */
INLINE quarter_vec quarter(vec x)
{
    union { vec whole; half_vec halves[2]; } a = {x};
    union { half_vec whole; quarter_vec halves[2]; } b = {a.halves[0] + a.halves[1]};
    return b.halves[0] + b.halves[1];
}

INLINE REAL total(vec x)
{
    quarter_vec c = quarter(x);
    if (LANES == 8)
        return c[0] + c[1];
    return (c[0] + c[2 % (LANES / 4)]) + (c[1] + c[3 % (LANES / 4)]);
}

/* The totals of ROWS vectors, bit for bit those of `total`; four at once where they fill a vector. */
INLINE void totals(const vec *x, REAL *out)
{
#if FLOAT(REAL) && __has_builtin(__builtin_shufflevector)
    quarter_vec a = quarter(x[0]), b = quarter(x[1]), c = quarter(x[2]), d = quarter(x[3]);
    a = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    c = __builtin_shufflevector(c, d, 0, 1, 4, 5) + __builtin_shufflevector(c, d, 2, 3, 6, 7);
    a = __builtin_shufflevector(a, c, 0, 2, 4, 6) + __builtin_shufflevector(a, c, 1, 3, 5, 7);
    memcpy(out, &a, sizeof a);
#else
    for (int r = 0; r < ROWS; r++)
        out[r] = total(x[r]);
#endif
}

/* One vector with `rows` (at most ROWS) others, read once for all of them; two sums side by side for each, so that they
   wait less for themselves.  A row's sum is the same whatever `rows` is. */
INLINE void few_dots(const REAL *a, const REAL *const *x, long count, const int rows, REAL *out)
{
    vec sums[ROWS][2] = {0};
    long i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES)
        EACH_ROW(r) {
            sums[r][0] += load(a + i) * load(x[r] + i);
            sums[r][1] += load(a + i + LANES) * load(x[r] + i + LANES);
        }
    for (; i + LANES <= count; i += LANES)
        EACH_ROW(r)
            sums[r][0] += load(a + i) * load(x[r] + i);
    vec both[ROWS];
    EACH_ROW(r)
        both[r] = sums[r][0] + sums[r][1];
    if (rows == ROWS)
        totals(both, out);
    else
        EACH_ROW(r)
            out[r] = total(both[r]);
    EACH_ROW(r)
        for (long rest = i; rest < count; rest++)
            out[r] += a[rest] * x[r][rest];
}

INLINE REAL dot(const REAL *a, const REAL *b, long count)
{
    REAL sum;
    few_dots(a, &b, count, 1, &sum);
    return sum;
}

typedef __typeof__((vec){0} < (vec){0}) mask;

INLINE vec choose(mask where, vec a, vec b) { return (vec)(((mask)a & where) | ((mask)b & ~where)); }

INLINE vec all(REAL x) { return x + (vec){0}; }

/* exp(x), for float within 2 units in the last place: 2^n times a polynomial of the rest (Cephes); for double the C
   library's. */
INLINE vec exponentials(vec x)
{
    if (sizeof(REAL) == sizeof(double)) {
        for (int lane = 0; lane < LANES; lane++)
            x[lane] = exp(x[lane]);
        return x;
    }
    const vec low = all((REAL)-87.3), high = all((REAL)88.3), round = all(12582912); /* 1.5 * 2^23 */
    vec bounded = choose(x < low, low, choose(x > high, high, x));
    vec power = bounded * (REAL)1.44269504 + round - round;
    vec rest = bounded - power * (REAL)0.693359375 + power * (REAL)2.12194440e-4;
    vec y = (REAL)1.9875691500e-4 * rest + (REAL)1.3981999507e-3;
    y = y * rest + (REAL)8.3334519073e-3;
    y = y * rest + (REAL)4.1665795894e-2;
    y = y * rest + (REAL)1.6666665459e-1;
    y = y * rest + (REAL)5.0000001201e-1;
    y = y * rest * rest + rest + 1;
    mask bits = (__builtin_convertvector(power, mask) + 127) << 23;
    return choose(x < low, all(0), y * (vec)bits);
}

INLINE REAL exponential(REAL x) { return exponentials(all(x))[0]; }

/* Rounds to bfloat16, ties to even; only ever asked of finite float32 numbers. */
INLINE REAL to_bfloat16(REAL x)
{
    float narrow = (float)x;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
    memcpy(&narrow, &bits, sizeof bits);
    return isnan(x) ? x : (REAL)narrow;
}

INLINE void round_row(REAL *x, long count, int bfloat16)
{
    if (bfloat16)
        for (long i = 0; i < count; i++)
            x[i] = to_bfloat16(x[i]);
}

/* Rotates the last channels of one vector: pairs of numbers times the complex turns, `pairs` of them. */
INLINE void rotate(REAL *vector, long width, const REAL *turns, long pairs)
{
    REAL *x = vector + width - 2 * pairs;
    for (long i = 0; i < pairs; i++) {
        REAL real = x[2 * i], imaginary = x[2 * i + 1], cosine = turns[2 * i], sine = turns[2 * i + 1];
        x[2 * i] = real * cosine - imaginary * sine;
        x[2 * i + 1] = real * sine + imaginary * cosine;
    }
}

INLINE void norm_row(const REAL *x, const REAL *weight, REAL eps, long width, int bfloat16, REAL *y)
{
    REAL scale = 1 / sqrt(dot(x, x, width) / width + eps);
    if (weight)
        for (long i = 0; i < width; i++)
            y[i] = x[i] * scale * weight[i];
    else
        for (long i = 0; i < width; i++)
            y[i] = x[i] * scale;
    round_row(y, width, bfloat16);
}

#endif
