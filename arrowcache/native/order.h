/* The order: which row is at which place of a pass over all rows, shuffled by keys. Computed where it is asked for.
 *
 * Owns: nothing. It allocates nothing, has no state, and may be called from any thread.
 *
 * Blocks of places are shuffled, each by a bijection of its own, in one stage or in several. A bijection of n places is
 * a Feistel network over left x right >= n values (Luby and Rackoff, "How to construct pseudorandom permutations from
 * pseudorandom functions", SIAM J. Comput. 1988), where left is a power of two near the root of n, and right is what is
 * needed beside it (the generalized network of Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
 * Less than `left` values are n or above; they are mapped again until they are not. Rounds add: with xor, those of the
 * left half would make even permutations only. Their functions are the finalizer of SplitMix64 (Steele, Lea and Flood,
 * "Fast splittable pseudorandom number generators", OOPSLA 2014) of a value and a key, without the shifts that only
 * lower bits need.
 *
 * Rounds, by measurement: of 5 rows, chi-square over all permutations sees 14 rounds in two million; of 12, over pairs
 * of rows, 10 in half a million; of 1,000, over the distances of neighbours, 6 in 11 million, and of a million 4 in 250
 * million. So few rows get more rounds: 26 for 5 to 8, 12 for 1,000, 8 from 2**17 on. A round takes some 1.5 ns a row.
 *
 * The caller's part: places lie in [0, the last edge). What a structure points to stays where it is during a call.
 */
#ifndef ARROWCACHE_ORDER_H
#define ARROWCACHE_ORDER_H

#include "draw.h"

#define ORDER_KEYS 32 /* of a stage: one a round, of the most rounds */

/* Blocks of places, each shuffled by itself. */
typedef struct {
    const int64_t *edges; /* where each block begins, ascending, and where the last one ends; the first is 0 */
    int64_t blocks;
    const uint64_t *keys; /* (ORDER_KEYS) */
} order_stage;

/* A pass over all rows. */
typedef struct {
    const order_stage *stages; /* one after another */
    int64_t stage_count;

    /* If run_rows > 0, whole runs of so many places are shuffled in place of single ones; places after the last
       whole run stay. Then each place is moved to a row by a step function. */
    int64_t run_rows;
    int64_t steps;
    const int64_t *starts; /* (steps) of places, ascending; the first is 0 */
    const int64_t *shifts; /* (steps) what is added from there on */

    const draw_table *draws; /* if there is one, each place gets a row that is drawn, and nothing above counts */
    uint64_t draw_key;
} order_pass;

/* Write the rows at `count` places from `first` on, then at those from `first + apart` on, and so on: `times` times. */
void order_rows(const order_pass *, int64_t first, int64_t count, int64_t times, int64_t apart, int64_t *rows);

#endif
