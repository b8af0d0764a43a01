/* What `prepare` of few rows derives, and the pooling of compressors. */

#include "common.h"

/* What `prepare` of few rows derives; see `FewRows`. */
void window_tables(long rows, long reads, long first, const int64_t *positions, const int64_t *sequences,
                   const int64_t *anchors, const int64_t *tables, long width, const int64_t *bases,
                   const int64_t *starts, const int64_t *firsts, long block, int64_t *slots, int64_t *own_slots,
                   REAL *encoder, REAL *decoder)
{
    for (long row = 0; row < rows; row++) {
        long sequence = sequences[row], anchor = positions[anchors ? anchors[sequence] : row];
        for (long i = 0; i <= reads; i++) {
            /* the last turn finds the place of the row itself */
            long position = i < reads ? anchor + first + i : positions[row];
            long local = (position < 0 ? -1 : position / block) - bases[sequence];
            int seen = position >= (firsts ? firsts[sequence] : 0);
            long held = seen && local >= 0 && local < width ? tables[sequence * width + local] : -1;
            long slot = held >= 0 ? held * block + position % block : -1;
            if (i == reads) {
                own_slots[row] = slot;
                continue;
            }
            slots[row * reads + i] = slot;
            encoder[row * reads + i] = slot >= 0 ? 0 : -INFINITY;
            decoder[row * reads + i] = slot >= 0 && position >= starts[sequence] ? 0 : -INFINITY;
        }
    }
}

void turns(long rows, long pairs, long inverse, const int64_t *positions, const REAL *frequencies, REAL *turns)
{
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < pairs; i++) {
            REAL angle = (REAL)positions[row] * frequencies[i];
            *turns++ = cos(angle);
            *turns++ = inverse ? -sin(angle) : sin(angle);
        }
}

/* Slots and bias of entry numbers [rows, count], -1 = none; `fill` writes the numbers first: all that a row sees. */
void locate(long rows, long count, long ratio, long per_block, long fill, const int64_t *positions,
            const int64_t *sequences, const int64_t *tables, long width, int64_t *entries, int64_t *slots, REAL *bias)
{
    for (long row = 0; row < rows; row++)
        for (long i = row * count; i < (row + 1) * count; i++) {
            if (fill)
                entries[i] = i - row * count < (positions[row] + 1) / ratio ? i - row * count : -1;
            long entry = entries[i], block = entry < 0 ? -1 : tables[sequences[row] * width + entry / per_block];
            slots[i] = block < 0 ? -1 : block * per_block + entry % per_block;
            bias[i] = block < 0 ? -INFINITY : 0;
        }
}

/* Adds the shares exp(score - top) of one token's channels, at most LANES of them, and its values by them. */
INLINE void add_shares(long count, const REAL *score, const REAL *top, const REAL *value, REAL *sum, REAL *out)
{
    if (count >= LANES) {
        vec share = exponentials(load(score) - load(top));
        store(sum, load(sum) + share);
        store(out, load(out) + share * load(value));
        return;
    }
    for (long c = 0; c < count; c++) {
        REAL share = exponential(score[c] - top[c]);
        sum[c] += share;
        out[c] += share * value[c];
    }
}

/* What completes a group is pooled, from the step's rows and from the tail, which then takes in the step's last rows.
   values, scores [rows, span / ratio * width], `stride` apart; bias [ratio, as wide] or none; out [groups, width]. */
void compress(long rows, long groups, long span, long ring, long ratio, long width, const REAL *values, const REAL *scores,
              long stride, const REAL *bias, const int64_t *ends, const int64_t *positions, const int64_t *sequences,
              const int64_t *states, const int64_t *starts, const int64_t *lengths, REAL *kept_values,
              REAL *kept_scores, REAL *scratch, REAL *out)
{
    const long channels = span / ratio * width;
    for (long group = 0; group < groups; group++, out += width) {
        long end = ends[group], sequence = sequences[end];
        const REAL *value[span];
        REAL *top = scratch + span * width, *sum = top + width;
        for (long c = 0; c < width; c++)
            top[c] = -INFINITY, sum[c] = 0, out[c] = 0;
        for (long i = 0; i < span; i++) {
            long back = span - 1 - i, position = positions[end] - back, row = end - back;
            long skip = span > ratio && i >= ratio ? width : 0;
            REAL *score = scratch + i * width;
            value[i] = NULL;
            if (position < 0)
                continue;
            int in_step = row >= starts[sequence];
            long state = states[sequence] < 0 ? 0 : states[sequence]; /* a row of padding may read anything */
            long place = (state * ring + position % ring) * channels + skip;
            const REAL *from = in_step ? scores + row * stride + skip : kept_scores + place;
            const REAL *shift = in_step && bias ? bias + position % ratio * channels + skip : NULL;
            value[i] = in_step ? values + row * stride + skip : kept_values + place;
            for (long c = 0; c < width; c++)
                score[c] = shift ? from[c] + shift[c] : from[c];
            for (long c = 0; c < width; c++)
                top[c] = score[c] > top[c] ? score[c] : top[c];
        }
        for (long i = 0; i < span; i++)
            if (value[i])
                for (long c = 0; c < width; c += LANES)
                    add_shares(width - c, scratch + i * width + c, top + c, value[i] + c, sum + c, out + c);
        for (long c = 0; c < width; c++)
            out[c] /= sum[c];
    }
    for (long row = 0; row < rows; row++) {
        long sequence = sequences[row], position = positions[row];
        if (position < lengths[sequence] - ring || states[sequence] < 0)
            continue;
        long place = (states[sequence] * ring + position % ring) * channels;
        const REAL *shift = bias ? bias + position % ratio * channels : NULL;
        memcpy(kept_values + place, values + row * stride, channels * sizeof(REAL));
        for (long c = 0; c < channels; c++)
            kept_scores[place + c] = scores[row * stride + c] + (shift ? shift[c] : 0);
    }
}
