/* See maps.h. */
#define _GNU_SOURCE
#include "maps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))
static const uintptr_t HUGE_PAGE = 2 << 20;
enum { OWN = MAP_PRIVATE | MAP_NORESERVE };  /* nobody else sees, and no memory is reserved for, what is written */
enum { WINDOW = 32 << 10, CLOSE = 8 << 10 }; /* reading on over so much takes no longer than another call */
enum { HALF = 2 };                           /* quarters */
static int64_t mapped;                       /* files */
static int64_t mapped_bytes;                 /* their pages */

static int opened(const char *path)
{
    int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK; /* a pipe may have its name by now */
    int fd = open(path, flags | O_NOATIME);
    return fd < 0 && errno == EPERM ? open(path, flags) : fd; /* it is another user's */
}

static size_t in_pages(const maps_file *file)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return ((size_t)file->nbytes + page - 1) / page * page;
}

/* Returns: the bytes of addresses that this process uses; -1: unknown. */
static int64_t used_addresses(void)
{
    char text[32];
    int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    if (got <= 0)
        return -1;
    text[got] = 0;
    return strtoll(text, NULL, 10) * sysconf(_SC_PAGESIZE);
}

PUBLIC int64_t maps_room(int64_t quarters)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) || limit.rlim_cur > INT64_MAX / 4)
        return INT64_MAX;
    int64_t used = used_addresses(), ours = __atomic_load_n(&mapped_bytes, __ATOMIC_RELAXED);
    int64_t others = used - ours, left = (int64_t)limit.rlim_cur - (others > 0 ? others : 0);
    int64_t room = left / 4 * quarters - ours;
    return used < 0 || room < 0 ? 0 : room;
}

/* True if a file may be mapped beside those that are. */
static bool has_room(const maps_file *file, int64_t most)
{
    return maps_count() < most && (int64_t)in_pages(file) <= maps_room(HALF);
}

/* Map a file from a huge page on. */
static uint8_t *map_aligned(const maps_file *file)
{
    size_t length = in_pages(file);
    uint8_t *reserved = mmap(NULL, length + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) /* there may be addresses for the file alone */
        return mmap(NULL, length, PROT_READ, OWN, (int)file->fd, 0);
    size_t before = -(uintptr_t)reserved % HUGE_PAGE;
    uint8_t *address = mmap(reserved + before, length, PROT_READ, OWN | MAP_FIXED, (int)file->fd, 0);
    if (address == MAP_FAILED) {
        int error = errno;
        munmap(reserved, length + HUGE_PAGE);
        errno = error;
        return address;
    }
    munmap(reserved, before); /* refused where that is nothing */
    munmap(address + length, HUGE_PAGE - before);
    return address;
}

/* Map a file that is open; what a mapping has to be told comes next. Returns: 0, or the error's number. */
static int64_t map_untold(maps_file *file)
{
    size_t nbytes = (size_t)file->nbytes;
    uint8_t *address = nbytes < HUGE_PAGE ? mmap(NULL, nbytes, PROT_READ, OWN, (int)file->fd, 0)
                                          : map_aligned(file);
    if (address == MAP_FAILED)
        return errno;
    __atomic_fetch_add(&mapped, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&mapped_bytes, in_pages(file), __ATOMIC_RELAXED);
    file->address = address;
    return 0;
}

/* Of mappings that lie side by side. */
static void tell(uintptr_t start, uintptr_t end)
{
    madvise((void *)start, end - start, MADV_DONTFORK);
    madvise((void *)start, end - start, MADV_RANDOM);
}

static uintptr_t start_of(const maps_file *file) { return (uintptr_t)file->address; }
static uintptr_t end_of(const maps_file *file) { return start_of(file) + in_pages(file); }

PUBLIC int64_t maps_map(maps_file *file)
{
    if (file->address)
        return 0;
    int64_t error = map_untold(file);
    if (!error)
        tell(start_of(file), end_of(file));
    return error;
}

static int64_t closed(maps_file *file, int64_t error)
{
    maps_close(file);
    return error;
}

static int64_t open_within(maps_file *file, int64_t limit)
{
    int fd = opened(file->path);
    if (fd < 0)
        return errno;
    file->fd = fd;
    struct stat status;
    if (fstat(fd, &status))
        return closed(file, errno);
    if (!S_ISREG(status.st_mode))
        return closed(file, S_ISDIR(status.st_mode) ? EISDIR : ESPIPE);
    file->nbytes = status.st_size;
    file->device = (int64_t)status.st_dev;
    file->inode = (int64_t)status.st_ino;
    if (file->nbytes < 1 || file->nbytes > limit)
        return closed(file, MAPS_LENGTH);
    return 0;
}

PUBLIC int64_t maps_open(maps_file *file, int64_t limit, int64_t most)
{
    int64_t error = open_within(file, limit);
    if (error || !has_room(file, most))
        return error;
    error = maps_map(file);
    return error && error != ENOMEM ? closed(file, error) : 0;
}

PUBLIC void maps_close(maps_file *file)
{
    int fd = (int)file->fd;
    file->fd = -1; /* first: once it is closed, the number is anybody's */
    if (fd >= 0)
        close(fd);
}

/* Up to where a file is read at once from `start` on, within one part: the parts after it that are close, too. */
static int64_t end_of_read(const maps_kind *kind, int64_t part, int64_t start)
{
    const maps_part *parts = kind->parts;
    int64_t end = parts[part].start + parts[part].nbytes;
    while (++part < kind->count && end - start < WINDOW && parts[part].start - end < CLOSE)
        end = parts[part].start + parts[part].nbytes;
    return end - start < WINDOW ? end : start + WINDOW;
}

/* pread; unless it waits, EAGAIN where that would wait for the disk. */
static ssize_t read_at(const maps_file *file, void *out, size_t nbytes, int64_t at, bool waits)
{
    struct iovec to = {out, nbytes};
    ssize_t got = waits ? -1 : preadv2((int)file->fd, &to, 1, at, RWF_NOWAIT);
    if (waits || (got < 0 && errno != EAGAIN)) /* some file systems can't say */
        got = pread((int)file->fd, out, nbytes, at);
    return got;
}

PUBLIC int64_t maps_is_alike(const maps_file *file, const maps_kind *kind, int64_t waits)
{
    uint8_t window[WINDOW];
    int64_t from = 0, to = 0; /* bytes of the file that it holds */
    if (file->nbytes != kind->nbytes)
        return 0;
    for (int64_t i = 0; i < kind->count; i++) {
        const maps_part *part = &kind->parts[i];
        for (int64_t at = part->start, end = at + part->nbytes; at < end;) {
            if (at >= to) {
                ssize_t got = read_at(file, window, (size_t)(end_of_read(kind, i, at) - at), at, waits);
                if (got <= 0)
                    return got && errno == EAGAIN ? MAPS_WAITS : 0;
                from = at;
                to = at + got;
            }
            int64_t count = (end < to ? end : to) - at;
            if (memcmp(window + (at - from), part->bytes + (at - part->start), (size_t)count))
                return 0;
            at += count;
        }
    }
    return 1;
}

PUBLIC int64_t maps_open_alike(maps_file *const *files, int64_t count, const maps_kind *kind, int64_t most,
                               int64_t waits, uint8_t *alike)
{
    uintptr_t start = 0, end = 0; /* of those that are mapped and not told yet: each below the one before it */
    int64_t i = 0;
    for (; i < count; i++) {
        maps_file *file = files[i];
        int64_t is_alike = open_within(file, kind->nbytes) ? 0 : maps_is_alike(file, kind, waits);
        if (is_alike == MAPS_WAITS) {
            maps_close(file);
            break;
        }
        int64_t error = is_alike && has_room(file, most) ? map_untold(file) : 0;
        alike[i] = is_alike && (!error || error == ENOMEM);
        if (file->address && end_of(file) == start)
            start = start_of(file);
        else if (file->address) {
            tell(start, end);
            start = start_of(file);
            end = end_of(file);
        }
        maps_close(file);
    }
    tell(start, end);
    return i;
}

PUBLIC int64_t maps_unmap(maps_file *const *files, int64_t count)
{
    int64_t error = 0, next;
    for (int64_t i = 0; i < count; i = next) {
        uintptr_t start = start_of(files[i]), end = end_of(files[i]);
        for (next = i + 1; next < count && end_of(files[next]) == start; next++)
            start = start_of(files[next]); /* right below it: the kernel unmaps both in one go */
        bool is_mapped = files[i]->address;
        if (is_mapped && munmap((void *)start, end - start)) {
            error = errno;
            continue;
        }
        __atomic_fetch_sub(&mapped, is_mapped ? next - i : 0, __ATOMIC_RELAXED);
        __atomic_fetch_sub(&mapped_bytes, is_mapped ? end - start : 0, __ATOMIC_RELAXED);
        for (int64_t k = i; k < next; k++) {
            files[k]->address = NULL;
            maps_close(files[k]);
        }
    }
    return error;
}

PUBLIC int64_t maps_count(void)
{
    return __atomic_load_n(&mapped, __ATOMIC_RELAXED);
}

PUBLIC void maps_forget(void)
{
    __atomic_store_n(&mapped, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&mapped_bytes, 0, __ATOMIC_RELAXED);
}
