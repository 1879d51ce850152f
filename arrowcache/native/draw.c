/* See draw.h. */
#include "draw.h"

#include <float.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t blocks_of(int64_t rows) { return (rows + DRAW_FAN - 1) / DRAW_FAN; }

static int is_bad(float weight) { return !((weight >= 0) & (weight <= FLT_MAX)); }

/* The sums up to the end of each quarter of a block of weights. An addition waits for the one before it: few do. */
static void sum_quarters(const float *weights, double *ends)
{
    double sums[4];
    for (int64_t i = 0; i < 4; i++, weights += 4)
        sums[i] = ((double)weights[0] + (double)weights[1]) + ((double)weights[2] + (double)weights[3]);
    ends[0] = sums[0];
    ends[1] = sums[0] + sums[1];
    ends[2] = ends[1] + sums[2];
    ends[3] = ends[2] + sums[3];
}

/* The weights of a block, in `padded` with zeros behind the last row, if it ends before the block. */
static const float *block_at(const draw_table *of, int64_t first, float *padded)
{
    if (first + DRAW_FAN <= of->rows)
        return of->weights + first;
    memset(padded, 0, DRAW_FAN * sizeof *padded);
    if (first < of->rows)
        memcpy(padded, of->weights + first, (size_t)(of->rows - first) * sizeof *padded);
    return padded;
}

/* Make the node `node` of the lowest level, of the weights below it. */
static void sum_weights(const draw_table *of, int64_t node)
{
    double *ends = of->levels[of->level_count - 1] + node * DRAW_FAN, quarters[4], sum = 0;
    float padded[DRAW_FAN];
    for (int64_t i = 0, first = node * DRAW_FAN * DRAW_FAN; i < DRAW_FAN; i++, first += DRAW_FAN) {
        sum_quarters(block_at(of, first, padded), quarters);
        ends[i] = sum += quarters[3];
    }
}

/* Make a node of another level, of the nodes below it. */
static void sum_nodes(const draw_table *of, int64_t level, int64_t node, int64_t below)
{
    const double *ends_below = of->levels[level + 1];
    double *ends = of->levels[level] + node * DRAW_FAN, sum = 0;
    for (int64_t child = node * DRAW_FAN, i = 0; i < DRAW_FAN; i++, child++)
        ends[i] = sum += child < below ? ends_below[child * DRAW_FAN + DRAW_FAN - 1] : 0;
}

PUBLIC int64_t draw_fill(const draw_table *of, const float *source, float fill)
{
    int64_t nodes = blocks_of(blocks_of(of->rows)), copies = source != of->weights;
    for (int64_t node = 0; node < nodes; node++) {
        int64_t row = node * DRAW_FAN * DRAW_FAN, stop = least(row + DRAW_FAN * DRAW_FAN, of->rows);
        int bad = 0;
        for (int64_t i = row; i < stop; i++) {
            float weight = source[i] == source[i] ? source[i] : fill;
            bad |= is_bad(weight);
            if (copies)
                of->weights[i] = weight;
        }
        for (; bad && row < stop; row++)
            if (is_bad(of->weights[row]))
                return row;
        sum_weights(of, node);
    }
    for (int64_t level = of->level_count - 2; level >= 0; level--) {
        int64_t below = nodes;
        nodes = blocks_of(below);
        for (int64_t node = 0; node < nodes; node++)
            sum_nodes(of, level, node, below);
    }
    return -1;
}

PUBLIC int64_t draw_change(const draw_table *of, const float *source, float fill, const int64_t *rows, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        float weight = source[i] == source[i] ? source[i] : fill;
        if (is_bad(weight))
            return rows[i];
        of->weights[rows[i]] = weight;
    }
    int64_t width = DRAW_FAN * DRAW_FAN, below = blocks_of(of->rows);
    for (int64_t level = of->level_count - 1; level >= 0; level--, width *= DRAW_FAN) {
        for (int64_t i = 0, last = -1; i < count; i++) {
            int64_t node = rows[i] / width;
            if (node == last)
                continue;
            last = node;
            if (level == of->level_count - 1)
                sum_weights(of, node);
            else
                sum_nodes(of, level, node, below);
        }
        below = blocks_of(below);
    }
    return -1;
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

/* The number that is sought, or the largest one below a sum where rounding, as it hardly ever does, has taken it there. */
static double within(double sought, double sum)
{
    if (__builtin_expect(sought < sum, 1))
        return sought;
    return next_below(sum);
}

/* The first row of a block up to which the sum is above what is sought. */
static int64_t row_in(const draw_table *of, int64_t block, double sought)
{
    int64_t first = block * DRAW_FAN;
    float padded[DRAW_FAN];
    const float *weights = block_at(of, first, padded);
    double ends[5] = {0};
    sum_quarters(weights, ends + 1);
    int64_t quarter = (ends[1] <= sought) + (ends[2] <= sought) + (ends[3] <= sought), row = 4 * quarter;
    sought -= ends[quarter];
    double one = (double)weights[row], two = one + (double)weights[row + 1], three = two + (double)weights[row + 2];
    row += (one <= sought) + (two <= sought) + (three <= sought);
    while (__builtin_expect(weights[row] == 0, 0)) /* what rounding has taken to an end or beyond it */
        row--;
    return first + row;
}

void draw_rows(const draw_table *of, uint64_t key, int64_t first, int64_t count, int64_t *rows)
{
    double sought[DRAW_PLACES], total = of->levels[0][DRAW_FAN - 1];
    for (int64_t i = 0; i < count; i++) {
        sought[i] = share((uint64_t)(first + i), key) * total;
        rows[i] = 0;
    }
    for (int64_t level = 0; level < of->level_count; level++) {
        const double *ends = of->levels[level], *below = level + 1 < of->level_count ? of->levels[level + 1] : NULL;
        for (int64_t i = 0; i < count; i++) {
            const double *some = ends + rows[i] * DRAW_FAN;
            double at = within(sought[i], some[DRAW_FAN - 1]);
            int64_t passed = 4 * ((some[3] <= at) + (some[7] <= at) + (some[11] <= at));
            passed += (some[passed] <= at) + (some[passed + 1] <= at) + (some[passed + 2] <= at);
            sought[i] = passed ? at - some[passed - 1] : at;
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
