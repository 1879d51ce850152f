/* See chunks.h. */
#define _GNU_SOURCE
#include "chunks.h"
#include "files.h"

#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>

#define PUBLIC __attribute__((visibility("default")))

enum {
    CHUNK_BYTES = 256 << 10,   /* some 20 microseconds of copying; small beside what two threads would fight over */
    FETCHED_BYTES = 1 << 20,   /* of a chunk that copies nothing */
    LENGTHS_A_CHUNK = 4096,
    FETCHED_ROWS = 256,        /* of values, at most */
    MIN_DROPPED_BYTES = 4096, /* less shares its page with rows that are asked for next */
    BLOCK = 64,                /* rows that are looked up at a time */
    AHEAD = 8,                 /* rows; the misses of their first lines overlap */
    LINE = 64, LINES = 4,
};

/* A row's file and its place in it. */
typedef struct {
    const engine_segment *segment;
    int64_t row;
} place;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Rows. */

static const engine_segment *segment_of(const engine_rows *rows, int64_t id)
{
    if (rows->rows_each)
        return rows->segments + (uint64_t)id / (uint64_t)rows->rows_each;
    int64_t block = id >> rows->block_shift, low = rows->blocks[block], high = rows->blocks[block + 1];
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (rows->segments[middle].first <= id)
            low = middle;
        else
            high = middle - 1;
    }
    return rows->segments + low;
}

static place place_of(const engine_rows *rows, int64_t id)
{
    const engine_segment *segment = segment_of(rows, id);
    return (place){segment, id - segment->first};
}

static int64_t outside(const engine_rows *rows, const int64_t *ids, int64_t count)
{
    uint64_t first = (uint64_t)__atomic_load_n(&rows->first, __ATOMIC_RELAXED); /* its owner may raise it meanwhile */
    uint64_t span = (uint64_t)rows->rows - first;
    for (int64_t i = 0; i < count; i++)
        if ((uint64_t)ids[i] - first >= span)
            return i;
    return -1;
}

PUBLIC int64_t engine_segments(const engine_rows *rows, const int64_t *ids, int64_t count, int64_t *segments)
{
    int64_t bad = outside(rows, ids, count);
    for (int64_t i = 0; bad < 0 && i < count; i++)
        segments[i] = segment_of(rows, ids[i]) - rows->segments;
    return bad;
}

/* Bytes of a column before those of a row, in the file. */
static int64_t row_at(place at, const engine_column *column)
{
    return at.segment->at[column->buffer] + at.row * column->row_bytes;
}

static int64_t pieces_of(int64_t nbytes) { return (nbytes + ENGINE_PIECE_BYTES - 1) / ENGINE_PIECE_BYTES; }

static int64_t bytes_of_row(const engine_job *job)
{
    int64_t nbytes = 0;
    for (int64_t i = 0; i < job->column_count; i++)
        nbytes += job->columns[i].row_bytes;
    return nbytes;
}

static int64_t pieces_of_row(const engine_job *job)
{
    int64_t count = 0;
    for (int64_t i = 0; i < job->column_count; i++)
        count += pieces_of(job->columns[i].row_bytes);
    return count;
}

/* Note a row in `*what`, if it is the first. Returns: true: it is. */
static bool note(int64_t *what, int64_t index)
{
    int64_t none = 0;
    return __atomic_compare_exchange_n(what, &none, index + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

static void note_failure(engine_job *job, int64_t index, int error)
{
    if (note(&job->failed, index) && error > 0)
        job->error = error;
}

/* Copying. */

static inline void copy(uint8_t *to, const uint8_t *from, int64_t nbytes)
{
    switch (nbytes) { /* a call of memcpy costs more than these */
    case 1: *to = *from; break;
    case 2: memcpy(to, from, 2); break;
    case 4: memcpy(to, from, 4); break;
    case 8: memcpy(to, from, 8); break;
    case 16: memcpy(to, from, 16); break;
    default: memcpy(to, from, (size_t)nbytes);
    }
}

static inline const uint8_t *mapped(place at, const engine_column *column)
{
    return at.segment->base + row_at(at, column);
}

static inline void prefetch(const uint8_t *row, int64_t nbytes)
{
    for (int64_t at = 0; at < least(nbytes, LINES * LINE); at += LINE)
        __builtin_prefetch(row + at);
}

static void copy_rows(const engine_job *job, int64_t first, int64_t last)
{
    place places[BLOCK + AHEAD];
    for (int64_t start = first; start < last; start += BLOCK) {
        int64_t count = least(BLOCK, last - start), known = least(BLOCK + AHEAD, last - start);
        for (int64_t i = 0; i < known; i++)
            places[i] = place_of(job->rows, job->ids[start + i]);
        for (const engine_column *column = job->columns; column < job->columns + job->column_count; column++) {
            int64_t width = column->row_bytes;
            uint8_t *out = column->out + start * width;
            for (int64_t i = 0; start == first && i < least(AHEAD, known); i++)
                prefetch(mapped(places[i], column), width);
            for (int64_t i = 0; i < count; i++, out += width) {
                if (i + AHEAD < known)
                    prefetch(mapped(places[i + AHEAD], column), width);
                copy(out, mapped(places[i], column), width);
            }
        }
    }
}

/* Bytes `from` to `to` of a row, its columns one behind another. */
static void copy_part(const engine_job *job, int64_t index, int64_t from, int64_t to)
{
    place at = place_of(job->rows, job->ids[index]);
    for (const engine_column *column = job->columns; to > 0; column++) {
        int64_t width = column->row_bytes, stop = least(to, width);
        if (from < stop)
            copy(column->out + index * width + from, mapped(at, column) + from, stop - from);
        from = from > width ? from - width : 0;
        to -= width;
    }
}

/* Bytes `from` to `to` of all rows, one row behind another; whole ones, unless a row is more than a chunk. */
static void copy_bytes(const engine_job *job, int64_t from, int64_t to)
{
    int64_t nbytes = bytes_of_row(job), index = from / nbytes;
    if (nbytes <= CHUNK_BYTES)
        copy_rows(job, index, to / nbytes);
    else
        for (int64_t stop; from < to; from = stop, index++) {
            stop = least(to, (index + 1) * nbytes);
            copy_part(job, index, from - index * nbytes, stop - index * nbytes);
        }
}

/* Values. */

/* Find the values that offsets point to, in bytes of their file. Returns: false: they would lie outside it. */
static bool are_within(const engine_segment *segment, const engine_column *column, const int32_t ends[2],
                       int64_t *start, int64_t *nbytes)
{
    int64_t values = segment->at[column->buffer + 1];
    bool is_right = ends[0] >= 0 && ends[1] >= ends[0] && values + ends[1] * column->row_bytes <= segment->nbytes;
    *start = values + (is_right ? ends[0] * column->row_bytes : 0);
    *nbytes = is_right ? (ends[1] - ends[0]) * column->row_bytes : 0;
    return is_right;
}

static void place_value(engine_job *job, int64_t index, const engine_segment *segment, const int32_t ends[2])
{
    if (!are_within(segment, job->columns, ends, job->from + index, job->to + index + 1))
        note(&job->damaged, index); /* a cancellation stays */
}

static void find_values(engine_job *job, int64_t first, int64_t last)
{
    int64_t buffer = job->columns[0].buffer;
    place places[AHEAD];
    for (int64_t i = first - AHEAD; i < last; i++) {
        int64_t coming = i + AHEAD;
        place at = {0};
        if (i >= first)
            at = places[i % AHEAD];
        if (coming < last) {
            place there = places[coming % AHEAD] = place_of(job->rows, job->ids[coming]);
            __builtin_prefetch(there.segment->base + there.segment->at[buffer] + there.row * 4);
        }
        if (i < first)
            continue;
        int32_t ends[2];
        memcpy(ends, at.segment->base + at.segment->at[buffer] + at.row * 4, sizeof ends);
        place_value(job, i, at.segment, ends);
    }
}

/* Asks the disk for all lengths that are not in memory before it waits for any. */
static int64_t read_lengths(engine_job *job, reader *file, int64_t first, int64_t last)
{
    int64_t buffer = job->columns[0].buffer, missed = 0;
    for (int is_asked = 0; is_asked < 2; is_asked++)
        for (int64_t i = first; i < last; i++) {
            place at = place_of(job->rows, job->ids[i]);
            int64_t offsets = at.segment->at[buffer] + at.row * 4;
            int32_t ends[2] = {0, 0};
            int error = 0;
            if (is_asked && job->to[i + 1] >= 0)
                continue;
            if (is_asked)
                error = file_read(file, at.segment, offsets, (uint8_t *)ends, sizeof ends);
            else if (!file_peek(file, at.segment, offsets, (uint8_t *)ends, sizeof ends)) {
                file_ask(file, at.segment, offsets, sizeof ends);
                job->to[i + 1] = -1; /* no length is */
                missed++;
                continue;
            }
            if (error) {
                note_failure(job, i, error);
                ends[0] = ends[1] = 0;
            }
            place_value(job, i, at.segment, ends);
        }
    return missed;
}

/* The value that a byte is in. */
static int64_t value_at(const engine_job *job, int64_t byte)
{
    int64_t low = 0, high = job->count - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (job->to[middle] <= byte)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static const engine_segment *segment_of_value(const engine_job *job, int64_t index)
{
    return segment_of(job->rows, job->ids[index]);
}

static void copy_values(const engine_job *job, int64_t from, int64_t to)
{
    uint8_t *out = job->columns[0].out;
    for (int64_t i = value_at(job, from); from < to; i++) {
        int64_t next = i + AHEAD, stop = least(job->to[i + 1], to);
        if (next < job->count)
            prefetch(segment_of_value(job, next)->base + job->from[next], job->to[next + 1] - job->to[next]);
        if (from < stop)
            copy(out + from, segment_of_value(job, i)->base + job->from[i] + (from - job->to[i]), stop - from);
        from = from < stop ? stop : from;
    }
}

/* Reading. */

/* Ask for or read one piece of one row. `got`: NULL, or set to 1 if the piece is copied. Returns: true: it was not in
   memory. */
static bool get(engine_job *job, reader *file, int64_t index, const engine_segment *segment, int64_t at, uint8_t *out,
                int64_t nbytes, uint8_t *got)
{
    if (job->way == ENGINE_ASK) {
        if (got && (*got = (uint8_t)file_peek(file, segment, at, out, nbytes)))
            return false;
        file_ask(file, segment, at, nbytes);
        return true;
    }
    if (got && *got)
        return false;
    int error = file_read(file, segment, at, out, nbytes);
    if (error)
        note_failure(job, index, error);
    else if (job->drops && nbytes >= MIN_DROPPED_BYTES)
        file_drop(file, segment, at, nbytes);
    return false;
}

/* Pieces of rows, of bytes `from` to `to` of all; a piece belongs to where it begins. */
static int64_t get_pieces(engine_job *job, reader *file, int64_t from, int64_t to)
{
    int64_t missed = 0, each = pieces_of_row(job), nbytes = bytes_of_row(job);
    for (int64_t index = from / nbytes; index * nbytes < to; index++) {
        place at = place_of(job->rows, job->ids[index]);
        int64_t begin = index * nbytes, piece = index * each;
        for (const engine_column *column = job->columns; column < job->columns + job->column_count; column++) {
            int64_t width = column->row_bytes;
            for (int64_t done = 0; done < width; done += ENGINE_PIECE_BYTES, piece++)
                if (begin + done >= from && begin + done < to)
                    missed += get(job, file, index, at.segment, row_at(at, column) + done,
                                  column->out + index * width + done, least(ENGINE_PIECE_BYTES, width - done),
                                  job->got ? job->got + piece : NULL);
            begin += width;
        }
    }
    return missed;
}

/* The same of values. */
static int64_t get_values(engine_job *job, reader *file, int64_t from, int64_t to)
{
    int64_t missed = 0;
    for (int64_t i = value_at(job, from); i < job->count && job->to[i] < to; i++) {
        const engine_segment *segment = segment_of_value(job, i);
        int64_t begin = job->to[i], width = job->to[i + 1] - begin;
        uint8_t *got = job->got ? job->got + i + begin / ENGINE_PIECE_BYTES : NULL;
        for (int64_t piece = pieces_of(most(from - begin, 0)), done;
             (done = piece * ENGINE_PIECE_BYTES) < width && begin + done < to; piece++)
            missed += get(job, file, i, segment, job->from[i] + done, job->columns[0].out + begin + done,
                          least(ENGINE_PIECE_BYTES, width - done), got ? got + piece : NULL);
    }
    return missed;
}

/* Rows that follow one another: their columns' bytes in each file. */
static void fetch_rows(const engine_job *job, reader *file, int64_t first, int64_t last)
{
    for (int64_t stop; first < last; first = stop) {
        place at = place_of(job->rows, first);
        int64_t count = least(last, at.segment[1].first) - first;
        stop = first + count;
        if (!at.segment->at || !file_opens(file, at.segment)) /* a map would be waited for */
            continue;
        for (const engine_column *column = job->columns; column < job->columns + job->column_count; column++) {
            int64_t start = row_at(at, column), nbytes = count * column->row_bytes;
            if (job->kind == ENGINE_LENGTHS) {
                int32_t ends[2];
                int64_t offsets = at.segment->at[column->buffer] + at.row * 4;
                if (file_read(file, at.segment, offsets, (uint8_t *)ends, 4) ||
                    file_read(file, at.segment, offsets + count * 4, (uint8_t *)(ends + 1), 4) ||
                    !are_within(at.segment, column, ends, &start, &nbytes))
                    continue;
            }
            file_ask(file, at.segment, start, nbytes);
        }
    }
}

/* Jobs. */

/* Check ids; a job that would copy from a file that is not mapped reads. */
static int64_t check(engine_job *job)
{
    if (job->way == ENGINE_FETCH)
        return -1; /* what is out of range is left out */
    int64_t bad = job->kind == ENGINE_VALUES ? -1 : outside(job->rows, job->ids, job->count);
    for (int64_t i = 0; bad < 0 && i < job->count; i++) {
        const engine_segment *segment = segment_of(job->rows, job->ids[i]);
        const uint8_t *base = __atomic_load_n(&segment->base, __ATOMIC_ACQUIRE); /* it may be mapped meanwhile */
        if (!base && job->way == ENGINE_COPY)
            job->way = ENGINE_READ;
        if (!segment->at || !(base || segment->path))
            bad = i;
    }
    return bad;
}

/* The rows of an ENGINE_FETCH that there are. */
static int64_t fetched_from(const engine_job *job) { return most(job->ids[0], 0); }
static int64_t fetched_to(const engine_job *job) { return most(least(job->ids[1], job->rows->rows), 0); }

/* Cut a job. Returns: of how many units it consists. */
static int64_t cut(engine_job *job)
{
    int64_t nbytes = bytes_of_row(job);
    job->unit = job->kind == ENGINE_LENGTHS ? LENGTHS_A_CHUNK : CHUNK_BYTES;
    if (job->way == ENGINE_FETCH) {
        job->unit = job->kind == ENGINE_LENGTHS ? FETCHED_ROWS : nbytes ? most(FETCHED_BYTES / nbytes, 1) : 1;
        return nbytes ? fetched_to(job) - fetched_from(job) : 0;
    }
    if (job->kind == ENGINE_LENGTHS)
        return job->count;
    if (job->kind == ENGINE_VALUES)
        return job->count ? job->to[job->count] : 0;
    if (nbytes && nbytes <= CHUNK_BYTES)
        job->unit -= CHUNK_BYTES % nbytes;
    return job->count * nbytes;
}

int64_t chunks_prepare(engine_job *job)
{
    int64_t bad = check(job), units = bad < 0 ? cut(job) : 0;
    job->begun = 0;
    job->damaged = bad < 0 ? 0 : CANCELLED;
    job->failed = job->error = job->missed = 0;
    job->chunks = units > 0 ? (units + job->unit - 1) / job->unit : 0;
    __atomic_store_n(&job->left, (uint32_t)job->chunks, __ATOMIC_RELAXED);
    return bad;
}

static int64_t faults_so_far(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) ? 0 : usage.ru_majflt;
}

static void copy_chunk(engine_job *job, int64_t start, int64_t stop)
{
    if (job->kind == ENGINE_VALUES)
        copy_values(job, start, least(stop, job->to[job->count]));
    else if (job->kind == ENGINE_LENGTHS)
        find_values(job, start, least(stop, job->count));
    else
        copy_bytes(job, start, least(stop, job->count * bytes_of_row(job)));
}

/* Returns: the number of pieces that were not in memory. */
static int64_t read_chunk(engine_job *job, int64_t start, int64_t stop)
{
    reader file = {0};
    int64_t missed = 0;
    if (job->way == ENGINE_FETCH) {
        int64_t first = fetched_from(job) + start, lowest = __atomic_load_n(&job->rows->first, __ATOMIC_RELAXED);
        fetch_rows(job, &file, most(first, lowest), least(first + job->unit, fetched_to(job)));
    } else if (job->kind == ENGINE_VALUES)
        missed = get_values(job, &file, start, least(stop, job->to[job->count]));
    else if (job->kind == ENGINE_LENGTHS)
        missed = read_lengths(job, &file, start, least(stop, job->count));
    else
        missed = get_pieces(job, &file, start, least(stop, job->count * bytes_of_row(job)));
    file_end(&file);
    return missed;
}

void chunks_run(engine_job *job, int64_t chunk)
{
    int64_t missed, start = chunk * job->unit, stop = start + job->unit;
    if (job->way == ENGINE_COPY) {
        int64_t before = faults_so_far();
        copy_chunk(job, start, stop);
        missed = faults_so_far() - before;
    } else
        missed = read_chunk(job, start, stop);
    if (missed)
        __atomic_fetch_add(&job->missed, missed, __ATOMIC_RELAXED);
}

void chunks_finish(engine_job *job)
{
    if (job->kind != ENGINE_LENGTHS || job->way == ENGINE_FETCH || job->damaged == CANCELLED || !job->unit)
        return;
    job->unit = 0;
    job->to[0] = 0;
    for (int64_t i = 0; i < job->count; i++)
        job->to[i + 1] += job->to[i];
}
