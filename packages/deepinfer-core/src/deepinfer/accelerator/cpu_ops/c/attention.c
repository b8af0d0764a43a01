/* The index and the attention core. */

#include "common.h"

/* `few_dots` of a number of rows that the compiler does not know. */
INLINE void dots_of(const REAL *key, const REAL *const *queries, long width, int few, REAL *dots)
{
    if (few == ROWS)
        few_dots(key, queries, width, ROWS, dots);
    else
        for (int h = 0; h < few; h++)
            dots[h] = dot(key, queries[h], width);
}

/* scores[row, i] = sum over heads of weight * max(query . key, 0) for the entries a row sees, -inf for others. */
void index_scores(long rows, long heads, long width, long count, long ratio, const REAL *query, const REAL *weights,
                  const REAL *keys, const int64_t *slots, const int64_t *positions, REAL *scores)
{
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < count; i++) {
            REAL sum = -INFINITY;
            long slot = slots ? slots[row * count + i] : row * count + i;
            if (i < (positions[row] + 1) / ratio && slot >= 0) {
                const REAL *key = keys + slot * width;
                sum = 0;
                for (long head = 0; head < heads; head += ROWS) {
                    int few = heads - head < ROWS ? (int)(heads - head) : ROWS;
                    const REAL *queries[ROWS];
                    REAL dots[ROWS];
                    for (int h = 0; h < few; h++)
                        queries[h] = query + (row * heads + head + h) * width;
                    dots_of(key, queries, width, few, dots);
                    for (int h = 0; h < few; h++)
                        sum += weights[row * heads + head + h] * (dots[h] > 0 ? dots[h] : 0);
                }
            }
            scores[row * count + i] = sum;
        }
}

/* Whether entry a is worse than b: a smaller score, or the same and a larger number. */
INLINE int worse(const REAL *scores, int64_t a, int64_t b)
{
    return scores[a] < scores[b] || (scores[a] == scores[b] && a > b);
}

/* The `kept` best of `count` scores of each row, -1 instead of those of -inf; a heap with the worst on top. */
void best(long rows, long count, long kept, const REAL *scores, int64_t *entries)
{
    for (long row = 0; row < rows; row++, scores += count, entries += kept) {
        long held = 0;
        for (int64_t i = 0; i < count; i++) {
            long at;
            if (held < kept) {
                for (at = held++; at && worse(scores, i, entries[(at - 1) / 2]); at = (at - 1) / 2)
                    entries[at] = entries[(at - 1) / 2];
            } else {
                if (worse(scores, i, entries[0]))
                    continue;
                for (at = 0; 2 * at + 1 < held;) {
                    long child = 2 * at + 1;
                    child += child + 1 < held && worse(scores, entries[child + 1], entries[child]);
                    if (!worse(scores, entries[child], i))
                        break;
                    entries[at] = entries[child], at = child;
                }
            }
            entries[at] = i;
        }
        for (long i = 0; i < kept; i++)
            entries[i] = i < held && scores[entries[i]] > -INFINITY ? entries[i] : -1;
    }
}

/* Pointers to the keys [count, width] that a row sees: at `slots` [rows, count], or its own, row after row. */
INLINE long visible(const REAL *keys, const int64_t *slots, const REAL *bias, long row, long count, long width,
                    const REAL **found)
{
    long seen = 0;
    for (long i = row * count; i < (row + 1) * count; i++)
        if (bias[i] == 0) {
            const REAL *key = keys + (slots ? slots[i] : i) * width;
            for (long c = 0; c < width; c += LANES)
                __builtin_prefetch(key + c);
            found[seen++] = key;
        }
    return seen;
}

/* sums [heads, width] of vectors, each read once, by the shares of a few heads, `stride` apart */
INLINE void few_sums(const REAL *const *vectors, const REAL *shares, long stride, long count, long width,
                     const int rows, REAL *out)
{
    long d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) {
        vec sums[ROWS][2] = {0};
        for (long i = 0; i < count; i++) {
            vec left = load(vectors[i] + d), right = load(vectors[i] + d + LANES);
            KEEP(left);
            KEEP(right);
            EACH_ROW(h) {
                sums[h][0] += shares[h * stride + i] * left;
                sums[h][1] += shares[h * stride + i] * right;
            }
        }
        EACH_ROW(h)
            store(out + h * width + d, sums[h][0]), store(out + h * width + d + LANES, sums[h][1]);
    }
    for (; d < width; d++)
        EACH_ROW(h) {
            REAL sum = 0;
            for (long i = 0; i < count; i++)
                sum += shares[h * stride + i] * vectors[i][d];
            out[h * width + d] = sum;
        }
}

/* scores of a few queries, `stride` apart, with each key, which is read once for all of them */
INLINE void few_scores(const REAL *const *queries, const REAL *const *keys, REAL scale, long count, long width, int few,
                       REAL *scores, long stride)
{
    for (long i = 0; i < count; i++) {
        REAL dots[ROWS];
        dots_of(keys[i], queries, width, few, dots);
        for (int h = 0; h < few; h++)
            scores[h * stride + i] = dots[h] * scale;
    }
    for (int h = 0; h < few; h++)
        for (long i = count; i < stride; i++)
            scores[h * stride + i] = -INFINITY;
}

/* Softmax of one head's scores beside its sink, in place; they are filled up with -inf to whole vectors. */
INLINE void softmax(REAL *scores, REAL sink, long count)
{
    vec tops = all(sink), sums = {0};
    REAL top = sink;
    for (long i = 0; i < count; i += LANES)
        tops = choose(load(scores + i) > tops, load(scores + i), tops);
    for (int lane = 0; lane < LANES; lane++)
        top = tops[lane] > top ? tops[lane] : top;
    for (long i = 0; i < count; i += LANES) {
        store(scores + i, exponentials(load(scores + i) - top));
        sums += load(scores + i);
    }
    vec factor = all(1 / (exponential(sink - top) + total(sums)));
    for (long i = 0; i < count; i += LANES)
        store(scores + i, load(scores + i) * factor);
}

void attention(long rows, long heads, long width, long pairs, const REAL *q, const REAL *sink, const REAL *turns,
               const REAL *window, const int64_t *window_slots, const REAL *window_bias, long window_count,
               const REAL *entries, const int64_t *entry_slots, const REAL *entry_bias, long entry_count,
               const REAL **found, REAL *scores, REAL *out)
{
    REAL scale = 1 / sqrt((REAL)width);
    for (long row = 0; row < rows; row++) {
        long count = visible(window, window_slots, window_bias, row, window_count, width, found);
        count += visible(entries, entry_slots, entry_bias, row, entry_count, width, found + count);
        const long stride = (count + LANES - 1) / LANES * LANES;
        for (long head = 0; head < heads; head += ROWS) {
            int few = heads - head < ROWS ? (int)(heads - head) : ROWS;
            const REAL *queries[ROWS];
            for (int h = 0; h < few; h++)
                queries[h] = q + (row * heads + head + h) * width;
            few_scores(queries, found, scale, count, width, few, scores, stride);
            REAL *to = out + (row * heads + head) * width;
            for (int h = 0; h < few; h++)
                softmax(scores + h * stride, sink[head + h], count);
            if (few == ROWS)
                few_sums(found, scores, stride, count, width, ROWS, to);
            else
                for (int h = 0; h < few; h++)
                    few_sums(found, scores + h * stride, stride, count, width, 1, to + h * width);
            for (int h = 0; h < few; h++)
                rotate(to + h * width, width, turns + row * 2 * pairs, pairs);
        }
    }
}
