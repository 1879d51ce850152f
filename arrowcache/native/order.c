/* See order.h. */
#include "order.h"

#define PUBLIC __attribute__((visibility("default")))

enum {
    LANES = 8, /* values that are mapped at a time, so that none waits for another one's multiplication */
    BATCH = DRAW_PLACES /* places that are looked at at a time */
};

__extension__ typedef unsigned __int128 uint128;

/* The bijection of one block. */
typedef struct {
    const uint64_t *keys;
    uint64_t tweak;      /* the block's own, for all keys */
    uint64_t right_size; /* a value is right * 2**half + left */
    int half, rounds;
} network;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static uint64_t mixed(uint64_t value)
{
    value *= 0xBF58476D1CE4E5B9;
    return (value ^ (value >> 32)) * 0x94D049BB133111EB;
}

/* The index of the last one that is not above `value`; the first one is not. */
static int64_t last_until(const int64_t *ascending, int64_t count, int64_t value)
{
    int64_t low = 0;
    while (count > 1) {
        int64_t half = count / 2;
        if (ascending[low + half] <= value)
            low += half;
        count -= half;
    }
    return low;
}

static network network_of(const order_stage *stage, int64_t block, uint64_t rows)
{
    int bits = 64 - __builtin_clzll(rows - 1);
    int half = bits > 1 ? bits / 2 : 1, rounds = bits < 32 ? 2 * (3 + 32 / bits) : 8;
    return (network){
        .keys = stage->keys,
        .tweak = mixed((uint64_t)block),
        .right_size = (rows + (UINT64_C(1) << half) - 1) >> half,
        .half = half,
        .rounds = rounds < ORDER_KEYS ? rounds : ORDER_KEYS,
    };
}

static void map(const network *net, uint64_t values[LANES])
{
    uint64_t left[LANES], right[LANES], size = net->right_size, mask = (UINT64_C(1) << net->half) - 1;
    int half = net->half, unused = 64 - half;
    for (int i = 0; i < LANES; i++) {
        left[i] = values[i] & mask;
        right[i] = values[i] >> half;
    }
    for (int round = 0; round < net->rounds; round += 2) {
        uint64_t key = net->keys[round] ^ net->tweak, next_key = net->keys[round + 1] ^ net->tweak;
        for (int i = 0; i < LANES; i++)
            left[i] = (left[i] + (mixed(right[i] ^ key) >> unused)) & mask;
        for (int i = 0; i < LANES; i++) {
            right[i] += (uint64_t)(((uint128)mixed(left[i] ^ next_key) * size) >> 64);
            uint64_t less = right[i] - size; /* a negative one is huge */
            right[i] = less < right[i] ? less : right[i];
        }
    }
    for (int i = 0; i < LANES; i++)
        values[i] = right[i] << half | left[i];
}

/* Shuffle those of the places that lie in a block. */
static void shuffle_block(const order_stage *stage, int64_t block, int64_t *places, int64_t count)
{
    int64_t first = stage->edges[block];
    uint64_t rows = (uint64_t)(stage->edges[block + 1] - first), values[LANES] = {0};
    if (rows < 2)
        return;
    network net = network_of(stage, block, rows);
    int64_t at[LANES], lanes = 0, next = 0;
    for (;;) {
        for (; lanes < LANES && next < count; next++) {
            uint64_t value = (uint64_t)(places[next] - first);
            if (value < rows) {
                at[lanes] = next;
                values[lanes++] = value;
            }
        }
        if (!lanes)
            return;
        map(&net, values);
        int64_t outside = 0;
        for (int64_t i = 0; i < lanes; i++) {
            if (values[i] < rows) {
                places[at[i]] = first + (int64_t)values[i];
            } else {
                at[outside] = at[i];
                values[outside++] = values[i];
            }
        }
        lanes = outside;
    }
}

static void shuffle(const order_pass *pass, int64_t *places, int64_t count)
{
    for (const order_stage *stage = pass->stages; stage < pass->stages + pass->stage_count; stage++) {
        int64_t low = places[0], high = places[0];
        for (int64_t i = 1; i < count; i++) {
            low = places[i] < low ? places[i] : low;
            high = places[i] > high ? places[i] : high;
        }
        int64_t last = last_until(stage->edges, stage->blocks, high);
        for (int64_t block = last_until(stage->edges, stage->blocks, low); block <= last; block++)
            shuffle_block(stage, block, places, count);
    }
}

/* Of up to BATCH places. */
static void order_runs(const order_pass *pass, int64_t first, int64_t count, int64_t *rows)
{
    const order_stage *last_stage = pass->stages + pass->stage_count - 1;
    int64_t size = pass->run_rows, run = first / size, row = first % size;
    int64_t runs[BATCH], run_count = (row + count - 1) / size + 1;
    for (int64_t i = 0; i < run_count; i++)
        runs[i] = run + i;
    int64_t whole = least(run_count, last_stage->edges[last_stage->blocks] - run);
    if (whole > 0)
        shuffle(pass, runs, whole);
    for (int64_t i = 0; count; i++, row = 0) {
        int64_t place = runs[i] * size + row, step = last_until(pass->starts, pass->steps, place);
        for (; row < size && count; row++, place++, count--) {
            while (step + 1 < pass->steps && pass->starts[step + 1] <= place)
                step++;
            *rows++ = place + pass->shifts[step];
        }
    }
}

/* Of up to BATCH places. */
static void order_some(const order_pass *pass, int64_t first, int64_t count, int64_t *rows)
{
    if (pass->draws) {
        draw_rows(pass->draws, pass->draw_key, first, count, rows);
        return;
    }
    if (pass->run_rows) {
        order_runs(pass, first, count, rows);
        return;
    }
    for (int64_t i = 0; i < count; i++)
        rows[i] = first + i;
    shuffle(pass, rows, count);
}

PUBLIC void order_rows(
    const order_pass *pass, int64_t first, int64_t count, int64_t times, int64_t apart, int64_t *rows)
{
    for (; times; times--, first += apart) {
        for (int64_t done = 0; done < count; done += BATCH) {
            int64_t some = least(count - done, BATCH);
            order_some(pass, first + done, some, rows);
            rows += some;
        }
    }
}
