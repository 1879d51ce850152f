/* Draws: rows with replacement, each as often as its weight says. Computed where they are asked for.
 *
 * A place gives a number in [0, 1) by SplitMix64 (see order.h). It is a share of the whole sum, and goes down a tree: at
 * each node to the first child up to which the sum of the children passes it, less the sum of those before that child. A
 * node has DRAW_FAN children: of the lowest ones these are blocks of as many weights as a line of the cache has, and the
 * row in a block is found as a child is. Sums are of doubles, in an order that depends on nothing else. So a node is a
 * function of the weights below it: where some weights change, the nodes above them are made anew, and the tree is the
 * same as one that is made of all weights. Where rounding takes a share to the end of a node or of a block, or beyond
 * it, the last row there is drawn that weighs: no weight of 0 is. Places go down the tree beside each other, so that
 * they wait for memory together: some 45 ns a draw of 10^6 rows, 90 of 10^7.
 *
 * Owns: nothing, as order.h. Nobody draws by a table while it is filled or changed.
 */
#ifndef ARROWCACHE_DRAW_H
#define ARROWCACHE_DRAW_H

#include <stdint.h>

#define DRAW_FAN 16    /* rows of a block, and children of a node */
#define DRAW_LEVELS 16 /* the most: of 2**62 rows */
#define DRAW_PLACES 64 /* the most at a time */

/* Weights, and a tree over them. */
typedef struct {
    float *weights; /* (rows) */
    int64_t rows;
    int64_t level_count;
    /* The top first, which has one node. A node is the sums up to the end of each of its children; those that are
       missing, behind the last row, have the sum of the node, which thus is its last number. A child is a node of the
       next level, or a block of weights. */
    double *levels[DRAW_LEVELS];
} draw_table;

/* Copy weights (rows) into the table, `fill` in place of NaN, and make the tree. The table's own weights as `source` are
   only read, and `fill` is NaN then. Returns: the first row whose weight is below 0, infinite or NaN, and there is no
   tree; -1: there is. */
int64_t draw_fill(const draw_table *, const float *source, float fill);

/* Give rows (count), ascending, the weights of `source` (count), `fill` in place of NaN, and make anew what is above
   them. Returns: as draw_fill. */
int64_t draw_change(const draw_table *, const float *source, float fill, const int64_t *rows, int64_t count);

/* Write the rows that are drawn at up to DRAW_PLACES places from `first` on. The table is filled; a weight is above 0. */
void draw_rows(const draw_table *, uint64_t key, int64_t first, int64_t count, int64_t *rows);

#endif
