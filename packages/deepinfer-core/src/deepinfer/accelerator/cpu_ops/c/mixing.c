/* Hyper-connections. */

#include "common.h"

/* Makes comb's rows and columns sum to 1 by turns, for LANES rows of the step at once. */
INLINE void sinkhorn(vec *comb, const long S, long iterations, REAL eps)
{
    for (long pass = 0; pass < 2 * iterations - 1; pass++)
        for (long line = 0; line < S; line++) {
            long first = pass % 2 ? line * S : line, step = pass % 2 ? 1 : S;
            vec sum = comb[first];
            for (long i = 1; i < S; i++)
                sum += comb[first + i * step];
            sum = 1 / (sum + eps);
            for (long i = 0; i < S; i++)
                comb[first + i * step] *= sum;
        }
}

/* The mixing of LANES rows: logits z [2 S + S * S] become pre, post and comb, in place. */
INLINE void mixing(vec *z, const long S, long iterations, REAL eps, const REAL *scale, const REAL *base)
{
    vec *comb = z + 2 * S;
    for (long i = 0; i < 2 * S; i++) {
        vec gate = 1 / (1 + exponentials(-(z[i] * scale[i / S] + base[i])));
        z[i] = i < S ? gate + eps : 2 * gate;
    }
    for (long i = 0; i < S; i++) {
        vec *line = comb + i * S, top, sum = {0};
        for (long j = 0; j < S; j++) {
            line[j] = line[j] * scale[2] + base[2 * S + i * S + j];
            top = j ? choose(line[j] > top, line[j], top) : line[j];
        }
        for (long j = 0; j < S; j++)
            sum += line[j] = exponentials(line[j] - top);
        for (long j = 0; j < S; j++)
            line[j] = line[j] / sum + eps;
    }
    sinkhorn(comb, S, iterations, eps);
}

/* sum of S vectors [S, D] by their shares */
INLINE void collapse(const REAL *in, const REAL *share, const long S, long D, REAL *restrict out)
{
    for (long d = 0; d < D; d++) {
        REAL sum = 0;
        for (long s = 0; s < S; s++)
            sum += share[s] * in[s * D + d];
        out[d] = sum;
    }
}

struct mixing {
    long streams, width, iterations, bfloat16;
    double eps, norm_eps;
    const REAL *fn, *scale, *base, *norm;
};

/* Normed logits of a few rows, into lanes from `lane` on. */
INLINE void mix_logits(const struct mixing *m, const long S, const int rows, const REAL *streams, vec *z, long lane)
{
    const long size = S * m->width;
    const REAL *flat[ROWS];
    REAL root[ROWS], dots[ROWS];
    for (int r = 0; r < rows; r++) {
        flat[r] = streams + r * size;
        root[r] = 1 / sqrt(dot(flat[r], flat[r], size) / size + m->norm_eps);
    }
    for (long i = 0; i < S * (S + 2); i++) {
        few_dots(m->fn + i * size, flat, size, rows, dots);
        for (int r = 0; r < rows; r++)
            z[i][lane + r] = dots[r] * root[r];
    }
}

INLINE void mix_in_tile(const struct mixing *m, const long S, long rows, const REAL *streams, const REAL *incoming,
                        REAL *pre, REAL *post, REAL *comb, REAL *x)
{
    vec z[MOST_STREAMS * (MOST_STREAMS + 2)] = {0};
    const long D = m->width;
    long row = 0;
    for (; row + ROWS <= rows; row += ROWS)
        mix_logits(m, S, ROWS, streams + row * S * D, z, row);
    for (; row < rows; row++)
        mix_logits(m, S, 1, streams + row * S * D, z, row);
    mixing(z, S, m->iterations, m->eps, m->scale, m->base);
    for (row = 0; row < rows; row++) {
        for (long i = 0; i < S; i++)
            pre[row * S + i] = z[i][row], post[row * S + i] = z[S + i][row];
        for (long i = 0; i < S * S; i++)
            comb[row * S * S + i] = z[2 * S + i][row];
        collapse(streams + row * S * D, (incoming ? incoming : pre) + row * S, S, D, x + row * D);
        round_row(x + row * D, D, m->bfloat16);
        norm_row(x + row * D, m->norm, m->norm_eps, D, m->bfloat16, x + row * D);
    }
}

void mix_in(const struct mixing *m, long rows, const REAL *streams, const REAL *incoming, REAL *pre, REAL *post,
            REAL *comb, REAL *x)
{
    const long S = m->streams, D = m->width;
    for (long row = 0; row < rows; row += LANES) {
        long count = rows - row < LANES ? rows - row : LANES;
        const REAL *in = streams + row * S * D, *given = incoming ? incoming + row * S : NULL;
        REAL *a = pre + row * S, *b = post + row * S, *c = comb + row * S * S, *out = x + row * D;
        if (S == 4) /* a constant lets the compiler unroll the usual case */
            mix_in_tile(m, 4, count, in, given, a, b, c, out);
        else
            mix_in_tile(m, S, count, in, given, a, b, c, out);
    }
}

/* V4's final weights [rows, S]: a sigmoid of one logit a stream */
void head_weights(const struct mixing *m, long rows, const REAL *streams, REAL *out)
{
    const long S = m->streams, size = S * m->width;
    for (long row = 0; row < rows; row++, streams += size, out += S) {
        REAL root = 1 / sqrt(dot(streams, streams, size) / size + m->norm_eps);
        for (long i = 0; i < S; i++) {
            REAL z = dot(m->fn + i * size, streams, size) * root;
            out[i] = 1 / (1 + exponential(-(z * m->scale[0] + m->base[i]))) + m->eps;
        }
    }
}

INLINE void mix_out_row(const long S, long D, const REAL *streams, const REAL *y, const REAL *post, const REAL *comb,
                        REAL *restrict out)
{
    for (long k = 0; k < S; k++)
        for (long d = 0; d < D; d++) {
            REAL sum = post[k] * y[d];
            for (long j = 0; j < S; j++)
                sum += comb[j * S + k] * streams[j * D + d];
            out[k * D + d] = sum;
        }
}

void mix_out(long rows, long S, long D, const REAL *streams, const REAL *y, const REAL *post, const REAL *comb,
             REAL *out)
{
    for (long row = 0; row < rows; row++, streams += S * D, out += S * D, y += D, post += S, comb += S * S)
        if (S == 4)
            mix_out_row(4, D, streams, y, post, comb, out);
        else
            mix_out_row(S, D, streams, y, post, comb, out);
}
