/* Draws: rows with replacement, each as often as its weight says. Computed where they are asked for.
 *
 * A place gives a number in [0, 1) by SplitMix64 (see order.h). The row is the first one up to which the sum of the
 * weights passes that share of the whole. Sums are of doubles, added one after another from the first row on, and so
 * the same wherever a block begins. A tree has the sums at the ends of blocks, down to blocks of as many weights as a
 * line of the cache has; the rest is added when it is asked for. Places go down the tree beside each other, so that
 * they wait for memory together: some 20 ns a draw of 10^7 rows.
 *
 * Owns: nothing, as order.h. A table is filled once, and only read from then on.
 */
#ifndef ARROWCACHE_DRAW_H
#define ARROWCACHE_DRAW_H

#include <stdint.h>

#define DRAW_FAN 16    /* rows of a block, and ends below an end */
#define DRAW_LEVELS 16 /* the most: of 2**62 rows */
#define DRAW_PLACES 64 /* the most at a time */

/* Weights, and a tree over them. */
typedef struct {
    const float *weights; /* (rows) */
    int64_t rows;
    int64_t level_count;
    /* The top first, which has up to DRAW_FAN ends. Each has the sums up to the ends of its blocks, then infinity up to
       a multiple of DRAW_FAN. The last one has an end for DRAW_FAN rows, each other one for DRAW_FAN ends below. */
    double *levels[DRAW_LEVELS];
} draw_table;

/* Fill the levels. Returns: the first row whose weight is below 0, infinite or NaN; -1 if there is none. */
int64_t draw_fill(const draw_table *);

/* Write the rows that are drawn at up to DRAW_PLACES places from `first` on. The table is filled; a weight is above 0. */
void draw_rows(const draw_table *, uint64_t key, int64_t first, int64_t count, int64_t *rows);

#endif
