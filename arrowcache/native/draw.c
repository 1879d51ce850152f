/* See draw.h. */
#include "draw.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t blocks_of(int64_t rows) { return (rows + DRAW_FAN - 1) / DRAW_FAN; }

PUBLIC int64_t draw_fill(const draw_table *of)
{
    int64_t level = of->level_count - 1, blocks = blocks_of(of->rows);
    double *ends = of->levels[level], sum = 0;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t row = block * DRAW_FAN, stop = least(row + DRAW_FAN, of->rows);
        int bad = 0;
        for (int64_t i = row; i < stop; i++)
            bad |= !((of->weights[i] >= 0) & (of->weights[i] <= FLT_MAX));
        for (; bad && row < stop; row++)
            if (!(of->weights[row] >= 0 && of->weights[row] <= FLT_MAX))
                return row;
        for (; row < stop; row++)
            sum += (double)of->weights[row];
        ends[block] = sum;
    }
    for (;; level--) {
        int64_t above = blocks_of(blocks);
        for (int64_t i = blocks; i < above * DRAW_FAN; i++)
            of->levels[level][i] = INFINITY;
        if (!level)
            return -1;
        for (int64_t i = 0; i < above; i++)
            of->levels[level - 1][i] = of->levels[level][i * DRAW_FAN + DRAW_FAN - 1];
        blocks = above;
    }
}

/* In [0, 1), uniform. */
static double share(uint64_t place, uint64_t key)
{
    uint64_t state = (place + 1) * UINT64_C(0x9E3779B97F4A7C15) + key;
    state = (state ^ (state >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    state = (state ^ (state >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (double)((state ^ (state >> 31)) >> 11) * 0x1p-53;
}

/* The largest double below a positive one. */
static double next_below(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits--;
    memcpy(&value, &bits, sizeof bits);
    return value;
}

/* The first row of a block up to which the sum is above what is sought. */
static int64_t row_in(const draw_table *of, int64_t block, double sought)
{
    int64_t first = block * DRAW_FAN, last = of->rows - 1, passed = 0;
    double sum = block ? of->levels[of->level_count - 1][block - 1] : 0;
    for (int64_t i = first; i < first + DRAW_FAN - 1; i++) { /* beyond the last row the sum has passed it */
        sum += (double)of->weights[least(i, last)];
        passed += sum <= sought;
    }
    return first + passed;
}

void draw_rows(const draw_table *of, uint64_t key, int64_t first, int64_t count, int64_t *rows)
{
    double sought[DRAW_PLACES], total = of->levels[of->level_count - 1][blocks_of(of->rows) - 1], most = next_below(total);
    for (int64_t i = 0; i < count; i++) {
        double at = share((uint64_t)(first + i), key) * total;
        sought[i] = at < most ? at : most;
        rows[i] = 0;
    }
    for (int64_t level = 0; level < of->level_count; level++) {
        const double *ends = of->levels[level], *below = level + 1 < of->level_count ? of->levels[level + 1] : NULL;
        for (int64_t i = 0; i < count; i++) {
            const double *some = ends + rows[i] * DRAW_FAN;
            int64_t passed = 0;
            for (int64_t half = DRAW_FAN / 2; half; half /= 2)
                passed += some[passed + half - 1] <= sought[i] ? half : 0;
            rows[i] = rows[i] * DRAW_FAN + passed;
            if (below) {
                __builtin_prefetch(below + rows[i] * DRAW_FAN);
                __builtin_prefetch(below + rows[i] * DRAW_FAN + DRAW_FAN / 2);
            } else {
                __builtin_prefetch(of->weights + rows[i] * DRAW_FAN);
            }
        }
    }
    for (int64_t i = 0; i < count; i++)
        rows[i] = row_in(of, rows[i], sought[i]);
}
