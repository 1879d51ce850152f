/* Files that are alike, or nearly so, made from bytes; a plain comparison says which of them are to be mapped. */
#ifndef ALIKE_H
#define ALIKE_H

#include "plain.h"

#include "maps.h"

enum { FILES = 10, PARTS = 6, KIND_BYTES = 3000 };

static const int64_t LIMIT = 1 << 20;

typedef struct {
    int64_t mapped, unlike, without;
} compared;

/* What is made at a path. */
enum { SAME, OTHER, LONGER, SHORTER, MISSING, FOLDER, LINK, PIPE, WHATS };

static char *path_of(int64_t number)
{
    const char *folder = getenv("TMPDIR");
    char path[PATH_BYTES * 8];
    int length = snprintf(path, sizeof path, "%s/alike-%d-%ld", folder ? folder : "/tmp", (int)getpid(), (long)number);
    CHECK(length > 0 && length < (int)sizeof path);
    char *exact = memory(length + 1);
    memcpy(exact, path, (size_t)length + 1);
    return exact;
}

static void write_whole(const char *path, const uint8_t *data, int64_t nbytes)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    CHECK(fd >= 0 && write(fd, data, (size_t)nbytes) == nbytes && !close(fd));
}

/* Parts of some bytes, each with memory of its own. Returns: how many. */
static int64_t make_parts(maps_part *parts, const uint8_t *data, int64_t nbytes, bytes *from)
{
    int64_t count = 0, at = 0;
    for (int64_t wanted = draw(from, PARTS + 1); count < wanted; count++) {
        int64_t start = at + draw(from, 100), length = draw(from, one_in(from, 3) ? KIND_BYTES : 100);
        if (start + length > nbytes)
            break;
        uint8_t *own = memory(length);
        memcpy(own, data + start, (size_t)length);
        parts[count] = (maps_part){start, length, own};
        at = start + length;
    }
    return count;
}

static void check_mapped(const maps_file *file, const uint8_t *data)
{
    CHECK(file->fd == -1 && file->address && !memcmp(file->address, data, (size_t)file->nbytes));
}

/* Open one file by itself, and compare, map and close it. */
static void check_one(maps_file *file, const maps_kind *kind, const uint8_t *data, bool is_alike, bytes *from)
{
    int64_t before = maps_count();
    bool may_be = draw(from, 2);
    CHECK(!maps_open(file, LIMIT, before + may_be) && file->fd >= 0 && !file->address == !may_be);
    CHECK(maps_is_alike(file, kind, true) == is_alike);
    int64_t told = maps_is_alike(file, kind, false);
    CHECK(told == is_alike || told == MAPS_WAITS);
    CHECK(!maps_map(file) && !maps_map(file) && maps_count() == before + 1);
    maps_close(file);
    maps_close(file);
    check_mapped(file, data);
    CHECK(!maps_unmap(&file, 1) && !file->address && maps_count() == before);
}

static void check_alike(bytes *from, compared *sum)
{
    int64_t nbytes = 1 + draw(from, KIND_BYTES), count = 1 + draw(from, FILES), before = maps_count();
    uint8_t *data[FILES], *kind_data = memory(nbytes);
    fill_noise(kind_data, nbytes, (uint64_t)draw(from, 256));
    maps_part parts[PARTS];
    maps_kind kind = {nbytes, make_parts(parts, kind_data, nbytes, from), parts};
    maps_file *files = memory(count * (int64_t)sizeof *files), *order[FILES];
    uint8_t *told = memory(count);
    bool expected[FILES];
    for (int64_t i = 0; i < count; i++) {
        int64_t what = draw(from, 2) ? draw(from, 2) : draw(from, WHATS), at = draw(from, nbytes);
        int64_t length = what == LONGER ? nbytes + 1 : what == SHORTER ? nbytes - 1 : nbytes;
        files[i] = (maps_file){path_of(i), -1, NULL, 0, 0, 0};
        data[i] = memory(length);
        memcpy(data[i], kind_data, (size_t)(length < nbytes ? length : nbytes));
        expected[i] = what == SAME || what == OTHER;
        if (what == OTHER) {
            data[i][at] ^= (uint8_t)(1 + draw(from, 255));
            for (int64_t k = 0; k < kind.count; k++)
                expected[i] &= at < parts[k].start || at >= parts[k].start + parts[k].nbytes;
        }
        if (what <= SHORTER)
            write_whole(files[i].path, data[i], length);
        else if (what == FOLDER)
            CHECK(!mkdir(files[i].path, 0700));
        else if (what == LINK)
            CHECK(!symlink(files[0].path, files[i].path));
        else if (what == PIPE)
            CHECK(!mkfifo(files[i].path, 0600));
        if (what <= SHORTER && length && one_in(from, 4))
            check_one(files + i, &kind, data[i], expected[i], from);
    }
    int64_t room = draw(from, count + 1), mapped = 0, shift = draw(from, count);
    for (int64_t i = 0; i < count; i++)
        order[i] = files + (i + shift) % count;
    int64_t done = maps_open_alike(order, count, &kind, before + room, false, told);
    CHECK(maps_open_alike(order + done, count - done, &kind, before + room, true, told + done) == count - done);
    for (int64_t i = 0; i < count; i++) {
        int64_t number = order[i] - files;
        CHECK(told[i] == expected[number] && files[number].fd == -1);
        CHECK(!files[number].address == !(told[i] && mapped < room));
        mapped += files[number].address ? 1 : 0;
        sum->unlike += !told[i];
        sum->without += told[i] && !files[number].address;
    }
    CHECK(maps_count() == before + mapped);
    sum->mapped += mapped;
    int64_t gone = draw(from, count + 1);
    CHECK(!maps_unmap(order, gone));
    for (int64_t i = 0; i < count; i++) {
        CHECK(i >= gone || !order[i]->address);
        if (order[i]->address)
            check_mapped(order[i], data[order[i] - files]);
    }
    CHECK(!maps_unmap(order, count) && maps_count() == before);
    for (int64_t i = 0; i < count; i++) {
        remove(files[i].path);
        free((void *)(uintptr_t)files[i].path);
        free(data[i]);
    }
    for (int64_t k = 0; k < kind.count; k++)
        free((void *)(uintptr_t)parts[k].bytes);
    free(files);
    free(told);
    free(kind_data);
}

#endif
