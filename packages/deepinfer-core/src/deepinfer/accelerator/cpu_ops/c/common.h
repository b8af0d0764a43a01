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

#define INLINE static inline __attribute__((always_inline))

typedef REAL vec __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));
typedef REAL half_vec __attribute__((vector_size(32)));
typedef REAL quarter_vec __attribute__((vector_size(16)));
enum { LANES = 64 / sizeof(REAL), ROWS = 4, MOST_STREAMS = 8 };

INLINE vec load(const REAL *x) { return *(const vec *)x; }

INLINE void store(REAL *x, vec value) { *(vec *)x = value; }

/* Halves are added to one another: few steps, instead of one after the other for every lane. */
INLINE REAL total(vec x)
{
    union { vec whole; half_vec halves[2]; } a = {x};
    union { half_vec whole; quarter_vec halves[2]; } b = {a.halves[0] + a.halves[1]};
    quarter_vec c = b.halves[0] + b.halves[1];
    if (LANES == 8)
        return c[0] + c[1];
    return (c[0] + c[2 % (LANES / 4)]) + (c[1] + c[3 % (LANES / 4)]);
}

INLINE REAL dot(const REAL *a, const REAL *b, long count)
{
    vec sums = {0};
    long i = 0;
    for (; i + LANES <= count; i += LANES)
        sums += load(a + i) * load(b + i);
    REAL sum = total(sums);
    for (; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

/* exp(x) in a form that compilers turn into vector instructions, within 2 units in the last place of a float: 2^n times
   a polynomial of the rest (Cephes).  For double the C library's. */
INLINE REAL exponential(REAL x)
{
    if (sizeof(REAL) == sizeof(double))
        return exp(x);
    float bounded = x < -87.3f ? -87.3f : x > 88.3f ? 88.3f : (float)x;
    int32_t n = (int32_t)(bounded * 1.44269504f + (bounded < 0 ? -0.5f : 0.5f));
    float rest = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f * rest + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1;
    int32_t bits = (n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.3f ? 0 : y * power;
}

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
