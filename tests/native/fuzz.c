/* Bytes become segments and a few jobs on them, in any order; a plain reader checks what the engine copies. Or they
 * become files that are alike, or nearly so; a plain comparison checks which of them are mapped.
 *
 * `make fuzz` compiles it for libFuzzer or AFL++. With -DDRIVER it has a main: `fuzz COUNT SEED` makes random inputs,
 * `fuzz FILE...` runs what a fuzzer has found, once more.
 */
#include "alike.h"
#include "plain.h"

enum { JOBS = 4, TURNS = 24, INPUT_BYTES = 512 };

static const int64_t SECOND = 1000000000;

static counts sum;
static compared alike;

typedef enum { NONE, BEGUN, ENDED } state;

static void end(engine *by, request *made, state *now, int64_t nanoseconds)
{
    if (*now != BEGUN || engine_take(by, &made->job, nanoseconds))
        return;
    check_ended(made, &sum);
    *now = ENDED;
}

/* With these few chunks it copies as many by itself, if no thread is there to begin them; it never reads. */
static void help(engine *by, request *made, state *now, int64_t chunks, int64_t threads)
{
    chunks = made->job.way == ENGINE_COPY ? chunks : 0;
    int64_t begun = made->job.begun, wanted = begun + chunks < made->job.chunks ? begun + chunks : made->job.chunks;
    int64_t is_under_way = engine_help(by, &made->job, chunks);
    CHECK(is_under_way == 0 || is_under_way == 1);
    CHECK(threads || (made->job.begun == wanted && is_under_way == (wanted < made->job.chunks)));
    if (is_under_way)
        return;
    check_ended(made, &sum);
    *now = ENDED;
}

static void cancel(engine *by, request *made, state *now)
{
    CHECK(engine_cancel(by, &made->job, 100 * SECOND) == 0);
    made->is_cancelled = true;
    check_ended(made, &sum);
    *now = ENDED;
}

/* A new job, or what follows one that has asked or found values. */
static void begin(engine *by, const table *of, request *made, state *now, bytes *from)
{
    bool is_new = *now == NONE || (*now == ENDED && !follow(made));
    if (*now == BEGUN)
        return;
    if (is_new) {
        if (*now == ENDED)
            free_request(made);
        *made = make_request(of, from);
    }
    *now = BEGUN;
    if (one_in(from, 4) && copy_now(made, &sum))
        *now = ENDED;
    else if (!check_begun(made, engine_submit(by, &made->job), &sum)) {
        made->is_cancelled = true; /* refused: it is done, and nothing was copied */
        CHECK(engine_take(by, &made->job, 0) == 0);
        CHECK(engine_help(by, &made->job, draw(from, 2)) == 0);
        *now = ENDED;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static engine *by;
    if (!by)
        CHECK((by = engine_new()));
    bytes from = {data, data + size};
    if (one_in(&from, 4)) {
        check_alike(&from, &alike);
        return 0;
    }
    int64_t threads = draw(&from, 4);
    CHECK(engine_start(by, threads) >= threads);
    table of = make_table(&from);
    request jobs[JOBS];
    state states[JOBS] = {NONE};
    for (int64_t turn = 0; turn < TURNS && from.next < from.end; turn++) {
        int64_t number = draw(&from, JOBS);
        request *made = jobs + number;
        switch (draw(&from, 9)) {
        case 0: case 1: case 2:
            begin(by, &of, made, states + number, &from);
            break;
        case 3:
            end(by, made, states + number, 0);
            break;
        case 4:
            end(by, made, states + number, SECOND);
            break;
        case 5:
            if (states[number] == BEGUN)
                cancel(by, made, states + number);
            break;
        case 6:
            if (states[number] != NONE)
                look_up(made);
            break;
        case 7:
            if (states[number] == BEGUN)
                help(by, made, states + number, draw(&from, 8), threads);
            break;
        default:
            if (draw(&from, 2))
                threads = engine_start(by, draw(&from, 4));
            else {
                CHECK(engine_stop(by, 100 * SECOND) == 0);
                threads = 0;
            }
        }
    }
    for (int64_t i = 0; i < JOBS; i++) {
        while (states[i] == BEGUN)
            end(by, jobs + i, states + i, SECOND);
        if (states[i] == ENDED)
            free_request(jobs + i);
    }
    CHECK(engine_stop(by, 100 * SECOND) == 0);
    free_table(&of);
    return 0;
}

#ifdef DRIVER
static void run_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    CHECK(file && !fseek(file, 0, SEEK_END));
    int64_t size = ftell(file);
    uint8_t *data = memory(size);
    rewind(file);
    CHECK(fread(data, 1, (size_t)size, file) == (size_t)size);
    fclose(file);
    LLVMFuzzerTestOneInput(data, (size_t)size);
    free(data);
}

int main(int argc, char **argv)
{
    int64_t count = argc == 3 ? strtoll(argv[1], NULL, 10) : 0;
    uint64_t random = argc == 3 ? strtoull(argv[2], NULL, 10) + 1 : 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t size = (int64_t)(next_random(&random) % INPUT_BYTES);
        uint8_t *data = memory(size);
        for (int64_t j = 0; j < size; j++)
            data[j] = (uint8_t)(next_random(&random) >> 56);
        LLVMFuzzerTestOneInput(data, (size_t)size);
        free(data);
    }
    for (int i = 1; i < argc && !count; i++)
        run_file(argv[i]);
    print_counts(&sum);
    printf("mapped %ld unlike %ld without %ld\n", (long)alike.mapped, (long)alike.unlike, (long)alike.without);
    return 0;
}
#endif
