/* Products and norms. */

#include "products.h"

void linear(long rows, long groups, long K, long N, const REAL *x, long stride, const REAL *weight, REAL *y)
{
    for (long row = 0; row < rows; row += TILE) {
        int count = rows - row < TILE ? (int)(rows - row) : TILE;
        for (long group = 0; group < groups; group++) {
            const REAL *in[TILE];
            REAL *out[TILE];
            for (int r = 0; r < count; r++)
                in[r] = x + (row + r) * stride + group * K, out[r] = y + ((row + r) * groups + group) * N;
            products(in, out, weight + group * N, groups * N, K, N, count);
        }
    }
}

void norm_rotate(long rows, long heads, long width, long pairs, double eps, long bfloat16, const REAL *x, long stride,
                 long normed, const REAL *weight, const REAL *turns, REAL *y)
{
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < heads; head++) {
            const REAL *in = x + row * stride + head * width;
            REAL *out = y + (row * heads + head) * width;
            if (normed)
                norm_row(in, weight, eps, width, bfloat16, out);
            else
                memcpy(out, in, width * sizeof(REAL));
            if (pairs)
                rotate(out, width, turns + row * 2 * pairs, pairs);
        }
}
