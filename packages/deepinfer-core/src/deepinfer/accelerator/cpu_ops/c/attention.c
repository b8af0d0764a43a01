/* The index and the attention core. */

#include "common.h"

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
                for (long head = 0; head < heads; head++) {
                    REAL product = dot(query + (row * heads + head) * width, key, width);
                    sum += weights[row * heads + head] * (product > 0 ? product : 0);
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
        if (bias[i] == 0)
            found[seen++] = keys + (slots ? slots[i] : i) * width;
    return seen;
}

/* sum of vectors by their shares, times a factor */
INLINE void weighted_sum(const REAL *const *vectors, const REAL *shares, REAL factor, long count, long width, REAL *to)
{
    long d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) {
        vec left = {0}, right = {0};
        for (long i = 0; i < count; i++) {
            left += shares[i] * load(vectors[i] + d);
            right += shares[i] * load(vectors[i] + d + LANES);
        }
        store(to + d, left * factor);
        store(to + d + LANES, right * factor);
    }
    for (; d < width; d++) {
        REAL sum = 0;
        for (long i = 0; i < count; i++)
            sum += shares[i] * vectors[i][d];
        to[d] = sum * factor;
    }
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
        for (long head = 0; head < heads; head++) {
            const REAL *query = q + (row * heads + head) * width;
            REAL *to = out + (row * heads + head) * width, top = sink[head];
            for (long i = 0; i < count; i++) {
                scores[i] = dot(query, found[i], width) * scale;
                top = scores[i] > top ? scores[i] : top;
            }
            REAL sum = exponential(sink[head] - top);
            for (long i = 0; i < count; i++)
                scores[i] = exponential(scores[i] - top);
            for (long i = 0; i < count; i++)
                sum += scores[i];
            weighted_sum(found, scores, 1 / sum, count, width, to);
            rotate(to, width, turns + row * 2 * pairs, pairs);
        }
    }
}
