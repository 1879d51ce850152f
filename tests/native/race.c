/* Threads that queue, take and cancel jobs on one engine while others start and stop its threads.
 *
 * `race SECONDS SEED`: for ThreadSanitizer. What is copied is compared with what a plain reader finds. Prints how much
 * was done.
 */
#include "plain.h"

#include <pthread.h>
#include <time.h>

enum { WORKERS = 3, SLOTS = 3, TABLES = 32, DECISION_BYTES = 64 };

static const int64_t SECOND = 1000000000;

static engine *shared;
static table tables[TABLES];
static bool is_over;

typedef struct {
    pthread_t thread;
    uint64_t state;
    counts sum;
} worker;

static bytes random_bytes(uint64_t *state, uint8_t *data, size_t nbytes)
{
    for (size_t i = 0; i < nbytes; i++)
        data[i] = (uint8_t)(next_random(state) >> 56);
    return (bytes){data, data + nbytes};
}

/* Help with a queued job, take it, or cancel it, perhaps on the way. */
static void end(request *made, bytes *from, counts *sum)
{
    int64_t cancel_at = one_in(from, 4) ? draw(from, 3) : -1;
    for (int64_t turn = 0;; turn++) {
        if (turn == cancel_at) {
            CHECK(engine_cancel(shared, &made->job, 100 * SECOND) == 0);
            made->is_cancelled = true;
            break;
        }
        if (draw(from, 2)) {
            if (!engine_help(shared, &made->job, draw(from, 4)))
                break;
        } else if (!engine_take(shared, &made->job, turn < 3 ? draw(from, 20000) : SECOND))
            break;
    }
    check_ended(made, sum);
}

/* A worker's slots have a job each; jobs are taken a while after they were queued. */
static void *work(void *argument)
{
    worker *self = argument;
    request slots[SLOTS];
    bool is_queued[SLOTS] = {false};
    uint8_t *data = malloc(DECISION_BYTES);
    CHECK(data);
    while (!__atomic_load_n(&is_over, __ATOMIC_RELAXED)) {
        bytes from = random_bytes(&self->state, data, DECISION_BYTES);
        int64_t number = draw(&from, SLOTS);
        request *made = slots + number;
        if (is_queued[number]) {
            end(made, &from, &self->sum);
            is_queued[number] = follow(made) && check_begun(made, engine_submit(shared, &made->job), &self->sum);
            if (!is_queued[number])
                free_request(made);
            continue;
        }
        *made = make_request(&tables[draw(&from, TABLES)], &from);
        if (one_in(&from, 4))
            look_up(made);
        if (one_in(&from, 16))
            engine_start(shared, 2);
        if (one_in(&from, 8) && copy_now(made, &self->sum)) {
            if (follow(made) && !copy_now(made, &self->sum))
                is_queued[number] = check_begun(made, engine_submit(shared, &made->job), &self->sum);
        } else {
            is_queued[number] = check_begun(made, engine_submit(shared, &made->job), &self->sum);
            CHECK(is_queued[number] || engine_take(shared, &made->job, 0) == 0);
            CHECK(is_queued[number] || engine_help(shared, &made->job, draw(&from, 2)) == 0);
        }
        if (!is_queued[number])
            free_request(made);
    }
    bytes none = {0};
    for (int64_t i = 0; i < SLOTS; i++)
        if (is_queued[i]) {
            end(slots + i, &none, &self->sum);
            free_request(slots + i);
        }
    free(data);
    return NULL;
}

static void *start_and_stop(void *argument)
{
    uint64_t state = *(uint64_t *)argument;
    while (!__atomic_load_n(&is_over, __ATOMIC_RELAXED)) {
        engine_start(shared, 1 + (int64_t)(next_random(&state) % 3));
        struct timespec nap = {0, (int64_t)(next_random(&state) % 3000000)};
        nanosleep(&nap, NULL);
        engine_stop(shared, 100 * SECOND);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    double seconds = strtod(argv[1], NULL);
    uint64_t seed = strtoull(argv[2], NULL, 10) + 1;
    static uint8_t data[4000];
    for (int64_t i = 0; i < TABLES; i++) {
        bytes from = random_bytes(&seed, data, sizeof data);
        tables[i] = make_table(&from);
    }
    CHECK(engine_version() == ENGINE_VERSION);
    CHECK((shared = engine_new()));

    worker workers[WORKERS];
    pthread_t starter;
    CHECK(!pthread_create(&starter, NULL, start_and_stop, &seed));
    for (int64_t i = 0; i < WORKERS; i++) {
        workers[i] = (worker){.state = seed + (uint64_t)i + 1};
        CHECK(!pthread_create(&workers[i].thread, NULL, work, workers + i));
    }
    struct timespec time = {(time_t)seconds, (int64_t)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&time, NULL);
    __atomic_store_n(&is_over, true, __ATOMIC_RELAXED);
    counts sum = {0};
    for (int64_t i = 0; i < WORKERS; i++) {
        pthread_join(workers[i].thread, NULL);
        counts own = workers[i].sum;
        sum = (counts){
            sum.done + own.done, sum.refused + own.refused, sum.cancelled + own.cancelled,
            sum.damaged + own.damaged, sum.failed + own.failed, sum.missed + own.missed, sum.read + own.read,
            sum.fetched + own.fetched, sum.nbytes + own.nbytes,
        };
    }
    pthread_join(starter, NULL);
    CHECK(engine_stop(shared, 100 * SECOND) == 0);
    for (int64_t i = 0; i < TABLES; i++)
        free_table(&tables[i]);
    print_counts(&sum);
    return 0;
}
