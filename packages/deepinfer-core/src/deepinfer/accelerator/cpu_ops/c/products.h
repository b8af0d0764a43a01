/* Rows times a weight: what linear layers and experts are made of. */

#ifndef DEEPINFER_PRODUCTS_H
#define DEEPINFER_PRODUCTS_H

#include "common.h"

enum { TILE = 8 };

/* `rows` (at most TILE) inputs of K numbers times one weight [K, N], its rows `stride` apart; each number of it is read
   once for all of them. */
INLINE void few_products(const REAL *const *x, REAL *const *y, const REAL *weight, long stride, long K, long N,
                         const int rows)
{
    long n = 0;
    for (; n + 2 * LANES <= N; n += 2 * LANES) {
        vec sums[TILE][2] = {0};
        for (long k = 0; k < K; k++) {
            vec left = load(weight + k * stride + n), right = load(weight + k * stride + n + LANES);
            KEEP(left);
            KEEP(right);
            EACH_ROW(r) {
                sums[r][0] += x[r][k] * left;
                sums[r][1] += x[r][k] * right;
            }
        }
        EACH_ROW(r)
            store(y[r] + n, sums[r][0]), store(y[r] + n + LANES, sums[r][1]);
    }
    for (; n < N; n++)
        EACH_ROW(r) {
            REAL sum = 0;
            for (long k = 0; k < K; k++)
                sum += x[r][k] * weight[k * stride + n];
            y[r][n] = sum;
        }
}

#define PRODUCTS(count) \
    case count: \
        few_products(x, y, weight, stride, K, N, count); \
        break

INLINE void products(const REAL *const *x, REAL *const *y, const REAL *weight, long stride, long K, long N, int rows)
{
    switch (rows) {
        PRODUCTS(1);
        PRODUCTS(2);
        PRODUCTS(3);
        PRODUCTS(4);
        PRODUCTS(5);
        PRODUCTS(6);
        PRODUCTS(7);
        PRODUCTS(8);
    }
}

#endif
