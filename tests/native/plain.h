/* Rows in files, jobs on them, and a plain reader that knows what the engine has to give.
 *
 * All of it is made from bytes: the fuzzer's or random ones. Each array has memory of exactly its size, so that a
 * sanitizer sees an access one byte too far. A difference ends the process by abort().
 */
#ifndef PLAIN_H
#define PLAIN_H

#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    SEGMENTS = 6,
    COLUMNS = 3,
    ROWS_A_SEGMENT = 64,
    FILE_BYTES = 600000,   /* size limit of a segment's columns of fixed width, if it has more than a row */
    OUT_BYTES = 640 << 10, /* size limit of what a job copies, if it has more than a row */
    FILL = 0xA5,           /* what a job's memory has before it is copied to */
    NOISE_BYTES = 1 << 16,
    LONGEST_VALUE = 3000,  /* elements */
    PATH_BYTES = 64,
};

static const int64_t WIDTHS[] = {1, 2, 4, 8, 16, 3, 7, 24, 100, 640, 5000, 300000};
static const int64_t ELEMENTS[] = {1, 2, 4, 8, 12};

#define CHECK(is_true) \
    do { \
        if (!(is_true)) { \
            fprintf(stderr, "%s:%d: this is not so: %s\n", __FILE__, __LINE__, #is_true); \
            abort(); \
        } \
    } while (0)

/* What was done, to see that a run tests something. */
typedef struct {
    int64_t done, refused, cancelled, damaged, failed, missed, read, fetched, nbytes;
} counts;

static void print_counts(const counts *sum)
{
    printf("done %ld refused %ld cancelled %ld damaged %ld failed %ld missed %ld read %ld fetched %ld bytes %ld\n",
           (long)sum->done, (long)sum->refused, (long)sum->cancelled, (long)sum->damaged, (long)sum->failed,
           (long)sum->missed, (long)sum->read, (long)sum->fetched, (long)sum->nbytes);
}

/* Bytes to decide by. */
typedef struct {
    const uint8_t *next, *end;
} bytes;

/* A number in [0, count), from the next bytes; 0 if there are none left. */
static int64_t draw(bytes *from, int64_t count)
{
    uint64_t number = 0;
    for (int64_t range = 1; range < count; range *= 256)
        number = number * 256 + (from->next < from->end ? *from->next++ : 0);
    return count > 0 ? (int64_t)(number % (uint64_t)count) : 0;
}

static bool one_in(bytes *from, int64_t count) { return draw(from, count) == count - 1; }

static uint64_t next_random(uint64_t *state) /* xorshift64* */
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545F4914F6CDD1D;
}

static void *memory(int64_t nbytes)
{
    void *made = malloc((size_t)nbytes);
    CHECK(made || !nbytes);
    if (nbytes)
        memset(made, FILL, (size_t)nbytes);
    return made;
}

/* Segments, as the engine gets them, and what the plain reader needs to know. */
typedef struct {
    engine_rows rows;
    engine_segment *segments;
    int64_t *blocks;
    int64_t fixed, widths[COLUMNS], variable, elements[COLUMNS];
    int64_t count[SEGMENTS]; /* of rows */
    int64_t *at[SEGMENTS];
    uint8_t *file[SEGMENTS];     /* its bytes; NULL: it is not known */
    int64_t file_bytes[SEGMENTS];
    char *path[SEGMENTS];        /* NULL: it has none */
    int64_t whole_bytes[SEGMENTS]; /* what the file at its path still has; -1: it is another one */
} table;

static void fill_noise(uint8_t *to, int64_t nbytes, uint64_t seed)
{
    static const uint8_t *noise;
    const uint8_t *known = __atomic_load_n(&noise, __ATOMIC_ACQUIRE);
    if (!known) { /* several threads may make it: it is the same */
        uint64_t *made = malloc(NOISE_BYTES), state = 1;
        CHECK(made);
        for (size_t i = 0; i < NOISE_BYTES / sizeof *made; i++)
            made[i] = next_random(&state);
        known = (const uint8_t *)made;
        __atomic_store_n(&noise, known, __ATOMIC_RELEASE);
    }
    uint64_t state = seed + 1;
    for (int64_t done = 0; done < nbytes;) {
        int64_t size = nbytes - done < 4096 ? nbytes - done : 4096;
        memcpy(to + done, known + next_random(&state) % (NOISE_BYTES - 4096), (size_t)size);
        done += size;
    }
}

/* A segment's file: columns with gaps between them; offsets that are right, or one that is not. */
static void make_file(table *made, int64_t number, bytes *from)
{
    int64_t rows = made->count[number], end = draw(from, 16), elements[COLUMNS], *at;
    int32_t *offsets[COLUMNS];
    at = made->at[number] = memory((made->fixed + 2 * made->variable) * 8);
    for (int64_t i = 0; i < made->fixed; i++) {
        at[i] = end;
        end += rows * made->widths[i] + draw(from, 16);
    }
    for (int64_t i = 0; i < made->variable; i++) {
        int32_t *ends = offsets[i] = memory((rows + 1) * 4);
        ends[0] = (int32_t)draw(from, 4);
        int64_t most = one_in(from, 16) ? LONGEST_VALUE : 9;
        for (int64_t row = 0; row < rows; row++)
            ends[row + 1] = ends[row] + (int32_t)draw(from, most);
        elements[i] = ends[rows];
        if (one_in(from, 8)) {
            const int32_t wrong[] = {-1, INT32_MIN, INT32_MAX, ends[rows] + 1, ends[rows] + 300};
            ends[draw(from, rows + 1)] = wrong[draw(from, 5)];
        }
        at[made->fixed + 2 * i] = end;
        at[made->fixed + 2 * i + 1] = end + (rows + 1) * 4;
        end += (rows + 1) * 4 + elements[i] * made->elements[i];
    }
    uint8_t *file = made->file[number] = memory(end);
    made->file_bytes[number] = end;
    fill_noise(file, end, (uint64_t)draw(from, 256));
    for (int64_t i = 0; i < made->variable; i++) {
        memcpy(file + at[made->fixed + 2 * i], offsets[i], (size_t)(rows + 1) * 4);
        free(offsets[i]);
    }
}

/* Put a segment's bytes into a file; at times it is truncated, replaced or gone by the time it is read. */
static void write_file(table *made, int64_t number, engine_segment *segment, bytes *from)
{
    static int64_t last;
    const char *folder = getenv("TMPDIR");
    char *path = made->path[number] = memory(PATH_BYTES + (folder ? (int64_t)strlen(folder) : 0));
    sprintf(path, "%s/arrowcache-%ld-%ld", folder ? folder : "/tmp", (long)getpid(), (long)++last);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    int64_t nbytes = made->file_bytes[number];
    struct stat status;
    CHECK(fd >= 0 && write(fd, made->file[number], (size_t)nbytes) == nbytes && !fstat(fd, &status));
    segment->path = path;
    segment->device = (int64_t)status.st_dev;
    segment->inode = (int64_t)status.st_ino;
    made->whole_bytes[number] = nbytes;
    if (one_in(from, 8)) { /* out of memory, if it can be */
        fsync(fd);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    }
    switch (draw(from, 6)) {
    case 1:
        CHECK(!ftruncate(fd, made->whole_bytes[number] = draw(from, nbytes)));
        break;
    case 2:
        segment->inode++;
        made->whole_bytes[number] = -1;
        break;
    case 3:
        unlink(path);
        made->whole_bytes[number] = -1;
    }
    close(fd);
}

/* The segment of a row and the row's place in it, counted one segment after another. */
static int64_t find(const table *of, int64_t id, int64_t *row)
{
    for (int64_t number = 0;; number++) {
        if (id < of->count[number]) {
            *row = id;
            return number;
        }
        id -= of->count[number];
    }
}

static table make_table(bytes *from)
{
    table made = {0};
    made.fixed = draw(from, COLUMNS + 1);
    int64_t row_bytes = 1;
    for (int64_t i = 0; i < made.fixed; i++)
        row_bytes += made.widths[i] = WIDTHS[draw(from, sizeof WIDTHS / sizeof *WIDTHS)];
    made.variable = draw(from, COLUMNS + 1);
    for (int64_t i = 0; i < made.variable; i++)
        made.elements[i] = ELEMENTS[draw(from, sizeof ELEMENTS / sizeof *ELEMENTS)];

    int64_t most = FILE_BYTES / row_bytes < ROWS_A_SEGMENT ? FILE_BYTES / row_bytes : ROWS_A_SEGMENT, rows = 0;
    int64_t count = one_in(from, 16) ? 0 : 1 + draw(from, SEGMENTS), each = draw(from, 2) ? 1 + draw(from, most) : 0;
    bool are_some_unknown = one_in(from, 16);
    made.segments = memory((count + 1) * (int64_t)sizeof *made.segments);
    for (int64_t i = 0; i < count; i++) {
        made.count[i] = !each ? draw(from, most + 1) : i < count - 1 ? each : draw(from, each + 1);
        engine_segment *segment = made.segments + i;
        *segment = (engine_segment){.first = rows};
        rows += made.count[i];
        if (are_some_unknown && draw(from, 2))
            continue;
        make_file(&made, i, from);
        segment->nbytes = made.file_bytes[i];
        segment->at = made.at[i];
        if (one_in(from, 3)) {
            write_file(&made, i, segment, from);
            if (draw(from, 2))
                continue;
        }
        segment->base = made.file[i];
    }
    made.segments[count] = (engine_segment){.first = rows};
    int64_t first = one_in(from, 4) ? draw(from, rows + 1) : 0, shift = draw(from, 8);
    if (!each && rows) {
        int64_t last = ((rows - 1) >> shift) + 1, row;
        made.blocks = memory((last + 1) * 8);
        for (int64_t i = 0; i <= last; i++)
            made.blocks[i] = find(&made, i << shift < rows ? i << shift : rows - 1, &row);
    }
    made.rows = (engine_rows){made.segments, made.blocks, count, first, rows, each, shift};
    return made;
}

static void free_table(table *of)
{
    free(of->segments);
    free(of->blocks);
    for (int64_t i = 0; i < SEGMENTS; i++) {
        free(of->at[i]);
        free(of->file[i]);
        if (of->path[i])
            unlink(of->path[i]);
        free(of->path[i]);
    }
}

/* A job and its memory. */
typedef struct {
    engine_job job;
    const table *of;
    int64_t *ids, *to;
    int64_t *from;
    uint8_t *got;
    int64_t way_of_values;
    engine_column *columns;
    bool is_cancelled;
} request;

static bool is_bad(const table *of, int64_t id)
{
    int64_t row;
    return id < of->rows.first || id >= of->rows.rows || !of->file[find(of, id, &row)];
}

/* Whether bytes of a segment's file can't be brought; they are copied from its map by an ENGINE_COPY alone. */
static bool is_lost(const request *made, int64_t number, int64_t at, int64_t nbytes)
{
    const engine_segment *segment = made->of->segments + number;
    int64_t whole = made->of->whole_bytes[number];
    if (made->job.way == ENGINE_COPY || !segment->path || (whole < 0 && segment->base))
        return false;
    return nbytes > 0 && (whole < 0 || at + nbytes > whole);
}

/* Numbers in even steps; some anywhere; at times one that is out of range. */
static int64_t *make_ids(const table *of, int64_t count, bytes *from)
{
    int64_t *ids = memory(count * 8), first = of->rows.first, rows = of->rows.rows, span = rows - first;
    int64_t start = draw(from, span), step = draw(from, 256);
    for (int64_t i = 0; i < count; i++)
        ids[i] = span ? first + (start + i * step) % span : 0;
    for (int64_t some = count ? draw(from, 8) : 0; some > 0; some--)
        ids[draw(from, count)] = first + draw(from, span);
    if (count && one_in(from, 16)) {
        const int64_t wrong[] = {first - 1, rows, rows + 1, rows + 1000, -1, INT64_MIN, INT64_MAX};
        ids[draw(from, count)] = wrong[draw(from, 7)];
    }
    return ids;
}

static int64_t pieces_of(int64_t nbytes) { return (nbytes + ENGINE_PIECE_BYTES - 1) / ENGINE_PIECE_BYTES; }

/* No piece is copied yet, of so many. */
static uint8_t *no_pieces(int64_t count)
{
    uint8_t *got = memory(count);
    if (count)
        memset(got, 0, (size_t)count);
    return got;
}

static request make_request(const table *of, bytes *from)
{
    request made = {.of = of};
    int64_t kind = of->variable && draw(from, 2) ? ENGINE_LENGTHS : ENGINE_FIXED, column_count = 1, row_bytes = 1;
    int64_t way = draw(from, 4), pieces = 0;
    if (way == ENGINE_ASK && kind == ENGINE_LENGTHS)
        way = ENGINE_READ;
    if (kind == ENGINE_FIXED)
        column_count = of->fixed ? draw(from, COLUMNS + 1) : 0;
    made.columns = memory(column_count * (int64_t)sizeof *made.columns);
    for (int64_t i = 0; i < column_count; i++) {
        int64_t chosen = draw(from, kind == ENGINE_FIXED ? of->fixed : of->variable);
        made.columns[i] = kind == ENGINE_FIXED
            ? (engine_column){.buffer = chosen, .row_bytes = of->widths[chosen]}
            : (engine_column){.buffer = of->fixed + 2 * chosen, .row_bytes = of->elements[chosen]};
        row_bytes += made.columns[i].row_bytes;
        pieces += pieces_of(made.columns[i].row_bytes);
    }
    int64_t count = one_in(from, 8) ? draw(from, 3000) : draw(from, 200);
    if (count > OUT_BYTES / row_bytes)
        count = OUT_BYTES / row_bytes;
    if (way == ENGINE_FETCH) {
        made.ids = make_ids(of, count = 2, from);
        kind = kind == ENGINE_FIXED || !column_count ? ENGINE_FIXED : ENGINE_LENGTHS;
    } else
        made.ids = make_ids(of, count, from);
    for (int64_t i = 0; i < column_count && kind == ENGINE_FIXED && way != ENGINE_FETCH; i++)
        made.columns[i].out = memory(count * made.columns[i].row_bytes);
    if (kind == ENGINE_LENGTHS && way != ENGINE_FETCH) {
        made.from = memory(count * 8);
        made.to = memory(count * 8 + 8);
        memset(made.to, 0x7F, (size_t)count * 8 + 8); /* a sum of these overflows */
    }
    if (kind == ENGINE_FIXED && (way == ENGINE_ASK || (way == ENGINE_READ && draw(from, 2))))
        made.got = no_pieces(count * pieces);
    made.way_of_values = draw(from, 3);
    made.job = (engine_job){
        .kind = kind, .way = way, .rows = &of->rows, .ids = made.ids, .count = count, .columns = made.columns,
        .column_count = column_count, .from = made.from, .to = made.to, .got = made.got, .drops = draw(from, 2),
    };
    return made;
}

static void free_request(request *made)
{
    for (int64_t i = 0; i < made->job.column_count; i++)
        free(made->columns[i].out);
    free(made->columns);
    free(made->ids);
    free(made->from);
    free(made->to);
    free(made->got);
    memset(made, FILL, sizeof *made);
}

/* A row's value in its file, in bytes from the file's begin; false: its offsets are out of the file. */
static bool value_of(const table *of, int64_t variable, int64_t id, int64_t *number, int64_t *begin, int64_t *end)
{
    int64_t row, width = of->elements[variable], buffer = of->fixed + 2 * variable;
    int32_t ends[2];
    *number = find(of, id, &row);
    memcpy(ends, of->file[*number] + of->at[*number][buffer] + row * 4, sizeof ends);
    int64_t values = of->at[*number][buffer + 1], most = (of->file_bytes[*number] - values) / width;
    bool is_right = 0 <= ends[0] && ends[0] <= ends[1] && ends[1] <= most;
    *begin = values + (is_right ? ends[0] * width : 0);
    *end = values + (is_right ? ends[1] * width : 0);
    return is_right;
}

/* Bytes are as they should be; some may be untouched. */
static void check_bytes(const uint8_t *out, const uint8_t *in, int64_t nbytes, bool may_be_untouched)
{
    if (nbytes && memcmp(out, in, (size_t)nbytes)) {
        CHECK(may_be_untouched);
        for (int64_t i = 0; i < nbytes; i++)
            CHECK(out[i] == in[i] || out[i] == FILL);
    }
}

/* What was found of the rows of a job. */
typedef struct {
    int64_t missed, lost;    /* pieces */
    bool names_a_lost_row;
} findings;

static void find_lost(const request *made, int64_t index, findings *all)
{
    all->lost++;
    all->names_a_lost_row |= made->job.failed == index + 1;
}

/* Bytes of a row, piece by piece; `got`: NULL, or that of the first. */
static void check_pieces(const request *made, int64_t index, int64_t number, int64_t at, const uint8_t *out,
                         int64_t nbytes, const uint8_t *got, findings *all)
{
    for (int64_t done = 0; done < nbytes; done += ENGINE_PIECE_BYTES, got = got ? got + 1 : NULL) {
        int64_t size = nbytes - done < ENGINE_PIECE_BYTES ? nbytes - done : ENGINE_PIECE_BYTES;
        bool is_asked = made->job.way == ENGINE_ASK, is_copied = got && *got;
        CHECK(!got || *got <= 1);
        all->missed += is_asked && !is_copied;
        if (!is_asked && !is_copied && is_lost(made, number, at + done, size))
            find_lost(made, index, all);
        else
            check_bytes(out + done, made->of->file[number] + at + done, size,
                        made->is_cancelled || (is_asked && !is_copied));
    }
}

static void check_fixed(const request *made, findings *all)
{
    const table *of = made->of;
    const uint8_t *got = made->got;
    for (int64_t i = 0; i < made->job.count; i++) {
        int64_t row, number = find(of, made->ids[i], &row);
        for (int64_t j = 0; j < made->job.column_count; j++) {
            const engine_column *column = made->columns + j;
            int64_t width = column->row_bytes;
            check_pieces(made, i, number, of->at[number][column->buffer] + row * width, column->out + i * width,
                         width, got, all);
            got = got ? got + pieces_of(width) : NULL;
        }
    }
}

static void check_lengths(const request *made, findings *all)
{
    int64_t buffer = made->columns[0].buffer, total = 0, damaged = 0, number, begin, end, row;
    bool names_a_damaged_row = false;
    if (made->is_cancelled)
        return;
    CHECK(made->to[0] == 0);
    for (int64_t i = 0; i < made->job.count; i++) {
        bool is_right = value_of(made->of, (buffer - made->of->fixed) / 2, made->ids[i], &number, &begin, &end);
        number = find(made->of, made->ids[i], &row);
        if (is_lost(made, number, made->of->at[number][buffer] + row * 4, 8)) {
            begin = end = made->of->at[number][buffer + 1];
            find_lost(made, i, all);
        } else if (!is_right) {
            damaged++;
            names_a_damaged_row |= made->job.damaged == i + 1;
        }
        total += end - begin;
        CHECK(made->to[i + 1] == total);
        CHECK(made->from[i] == begin);
    }
    CHECK(damaged ? names_a_damaged_row : made->job.damaged == 0);
}

static void check_values(const request *made, findings *all)
{
    int64_t row;
    for (int64_t i = 0; i < made->job.count; i++) {
        int64_t at = made->to[i], number = find(made->of, made->ids[i], &row);
        check_pieces(made, i, number, made->from[i], made->columns[0].out + at, made->to[i + 1] - at,
                     made->got ? made->got + i + at / ENGINE_PIECE_BYTES : NULL, all);
    }
}

static bool is_untouched(const uint8_t *out, int64_t nbytes)
{
    return !nbytes || (out[0] == FILL && !memcmp(out, out + 1, (size_t)nbytes - 1));
}

/* A job was queued, or refused for a reason: `bad` names a row that may not be asked for. Returns: whether it was. */
static bool check_begun(const request *made, int64_t bad, counts *sum)
{
    bool names_rows = made->job.kind != ENGINE_VALUES && made->job.way != ENGINE_FETCH;
    if (bad >= 0) {
        CHECK(names_rows && bad < made->job.count && is_bad(made->of, made->ids[bad]));
        for (int64_t i = 0; i < made->job.column_count && made->job.kind == ENGINE_FIXED; i++)
            CHECK(is_untouched(made->columns[i].out, made->job.count * made->columns[i].row_bytes));
        sum->refused++;
        return false;
    }
    CHECK(bad == -1);
    for (int64_t i = 0; i < made->job.count && names_rows; i++)
        CHECK(!is_bad(made->of, made->ids[i]));
    return true;
}

static void check_ended(const request *made, counts *sum)
{
    const engine_job *job = &made->job;
    findings all = {0};
    sum->done++;
    sum->cancelled += made->is_cancelled;
    CHECK(job->missed >= 0);
    if (job->way == ENGINE_FETCH) {
        sum->fetched++;
        return;
    }
    if (job->kind == ENGINE_FIXED)
        check_fixed(made, &all);
    else if (job->kind == ENGINE_LENGTHS)
        check_lengths(made, &all);
    else
        check_values(made, &all);
    if (!made->is_cancelled) {
        CHECK(all.lost ? all.names_a_lost_row : job->failed == 0);
        CHECK(job->way != ENGINE_ASK || job->missed == all.missed);
    }
    CHECK(job->error ? job->failed && (job->error == ENOENT || job->error == ESTALE) : true);
    sum->damaged += job->damaged > 0;
    sum->failed += job->failed > 0;
    sum->missed += all.missed;
    sum->read += job->way == ENGINE_READ;
    for (int64_t i = 0; i < job->column_count && job->kind == ENGINE_FIXED; i++)
        sum->nbytes += job->count * made->columns[i].row_bytes;
    sum->nbytes += job->kind == ENGINE_VALUES && job->count ? made->to[job->count] : 0;
}

/* Have a job that asked read, or one that found values bring them. Returns: false: it is no such job, or they are too
   many. */
static bool follow(request *made)
{
    int64_t count = made->job.count, total = 0;
    if (made->is_cancelled || made->job.way == ENGINE_FETCH)
        return false;
    if (made->job.way == ENGINE_ASK) {
        made->job.way = ENGINE_READ;
        return true;
    }
    if (made->job.kind != ENGINE_LENGTHS || made->to[count] > OUT_BYTES)
        return false;
    total = made->to[count];
    made->columns[0].out = memory(total);
    if (made->way_of_values == ENGINE_ASK)
        made->got = no_pieces(count + total / ENGINE_PIECE_BYTES);
    made->job = (engine_job){
        .kind = ENGINE_VALUES, .way = made->way_of_values, .rows = &made->of->rows, .ids = made->ids, .count = count,
        .columns = made->columns, .column_count = 1, .from = made->from, .to = made->to, .got = made->got,
    };
    return true;
}

/* Copy here and now, if all is mapped. Returns: false: it has to be queued. */
static bool copy_now(request *made, counts *sum)
{
    if (made->job.way != ENGINE_COPY)
        return false;
    int64_t bad = engine_copy(&made->job);
    if (bad == -2) {
        CHECK(made->job.way == ENGINE_READ);
        return false;
    }
    if (check_begun(made, bad, sum))
        check_ended(made, sum);
    else
        made->is_cancelled = true;
    return true;
}

/* What needs no end: the segments of a job's rows. */
static void look_up(const request *made)
{
    int64_t count = made->job.count, row, *segments = memory(count * 8);
    int64_t bad = engine_segments(&made->of->rows, made->ids, count, segments);
    CHECK(bad < 0 || (bad < count && is_bad(made->of, made->ids[bad])));
    for (int64_t i = 0; i < count && bad < 0; i++)
        CHECK(segments[i] == find(made->of, made->ids[i], &row));
    free(segments);
}

#endif
