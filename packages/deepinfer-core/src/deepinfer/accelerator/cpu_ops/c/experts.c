/* Routing and experts. */

#include "products.h"

void route(long rows, long D, long E, long k, long normalise, double factor, const REAL *x, const REAL *gate,
           const REAL *bias, long bias_stride, long given, int64_t *picks, REAL *weights, REAL *scores)
{
    for (long row = 0; row < rows; row++, x += D, picks += k, weights += k) {
        long e = 0;
        for (; e + ROWS <= E; e += ROWS) {
            const REAL *gates[ROWS];
            for (int r = 0; r < ROWS; r++)
                gates[r] = gate + (e + r) * D;
            few_dots(x, gates, D, ROWS, scores + e);
        }
        for (; e < E; e++)
            scores[e] = dot(x, gate + e * D, D);
        for (e = 0; e < E; e++) {
            REAL z = scores[e];
            scores[e] = sqrt((z > 0 ? z : 0) + log1p(exp(z > 0 ? -z : z)));
            scores[E + e] = scores[e] + (bias ? bias[row * bias_stride + e] : 0);
        }
        REAL sum = 0;
        for (long i = 0; i < k; i++) {
            if (!given) {
                long best = 0;
                for (long e = 1; e < E; e++)
                    best = scores[E + e] > scores[E + best] ? e : best;
                scores[E + best] = -INFINITY;
                picks[i] = best;
            }
            weights[i] = scores[picks[i]];
            sum += weights[i];
        }
        REAL share = normalise && k > 1 ? factor / (sum + (REAL)1e-20) : factor;
        for (long i = 0; i < k; i++)
            weights[i] *= share;
    }
}

/* Rounds to FP8 in groups that share a power of two, as `fp8_round`; float32 only. */
INLINE void round_fp8(REAL *row, long count, long group)
{
    for (long start = 0; start < count; start += group) {
        float largest = 1e-4f, power;
        for (long i = start; i < start + group; i++)
            largest = fabsf((float)row[i]) > largest ? fabsf((float)row[i]) : largest;
        float scale = largest * (1 / 448.0f);
        uint32_t bits;
        memcpy(&bits, &scale, sizeof bits);
        bits = (bits + 0x7FFFFF) & 0x7F800000;
        memcpy(&power, &bits, sizeof power);
        for (long i = start; i < start + group; i++) {
            float y = (float)row[i] / power, step;
            memcpy(&bits, &y, sizeof bits);
            int32_t exponent = (int32_t)(bits & 0x7F800000) - (3 << 23), smallest = (127 - 9) << 23;
            exponent = exponent > smallest ? exponent : smallest;
            memcpy(&step, &exponent, sizeof step);
            row[i] = rintf(y / step) * step * power;
        }
    }
}

/* hidden = weight * silu(min(gate, limit)) * clamp(up), rounded as the input of w2; in place over the first half. */
INLINE void activate(REAL *gate_up, long W, REAL weight, REAL limit, int bfloat16, long group)
{
    const vec most = all(limit);
    for (long i = 0; i < W; i += LANES) {
        long few = W - i < LANES ? W - i : LANES;
        vec gate = {0}, up = {0};
        memcpy(&gate, gate_up + i, few * sizeof(REAL));
        memcpy(&up, gate_up + W + i, few * sizeof(REAL));
        gate = choose(gate > most, most, gate);
        up = choose(up > most, most, choose(up < -most, -most, up));
        gate = gate / (1 + exponentials(-gate)) * up * weight;
        memcpy(gate_up + i, &gate, few * sizeof(REAL));
    }
    round_row(gate_up, W, bfloat16);
    if (group)
        round_fp8(gate_up, W, group);
}

void experts(long rows, long D, long W, long E, long k, double limit, long bfloat16, long group, const REAL *x,
             const int64_t *picks, const REAL *weights, const REAL *w13, const REAL *w2, REAL *scratch, REAL *out)
{
    memset(out, 0, rows * D * sizeof(REAL));
    for (long e = 0; e < E; e++) {
        long next = 0, last = rows * k;
        while (next < last) {
            const REAL *in[TILE], *given[TILE];
            REAL *hidden[TILE], *part[TILE];
            long place[TILE];
            int count = 0;
            for (; next < last && count < TILE; next++)
                if (picks ? picks[next] == e : 1) {
                    place[count] = next;
                    in[count] = x + next / k * D;
                    given[count] = hidden[count] = scratch + count * (2 * W + D);
                    part[count] = hidden[count] + 2 * W;
                    count++;
                }
            products(in, hidden, w13 + e * D * 2 * W, 2 * W, D, 2 * W, count);
            for (int r = 0; r < count; r++)
                activate(hidden[r], W, weights ? weights[place[r]] : 1, limit, bfloat16, group);
            products(given, part, w2 + e * W * D, D, W, D, count);
            for (int r = 0; r < count; r++)
                for (long d = 0; d < D; d++)
                    out[place[r] / k * D + d] += part[r][d];
        }
    }
}
