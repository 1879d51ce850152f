/* See files.h. */
#define _GNU_SOURCE
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    MAX_LOOKED_PAGES = 64,
    FILES = sizeof((reader *)0)->files / sizeof((reader *)0)->files[0],
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t page_bytes(void)
{
    static int64_t known;
    int64_t nbytes = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!nbytes)
        __atomic_store_n(&known, nbytes = sysconf(_SC_PAGESIZE), __ATOMIC_RELAXED);
    return nbytes;
}

/* A segment's descriptor, opened now; or -errno. */
static int opened(const engine_segment *segment)
{
    if (!segment->path)
        return -ENOENT;
    int fd, flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOATIME;
    while ((fd = open(segment->path, flags)) < 0 && (errno == EINTR || (errno == EPERM && flags & O_NOATIME)))
        if (errno == EPERM) /* it is another user's */
            flags &= ~O_NOATIME;
    if (fd < 0)
        return -errno;
    struct stat status;
    if (fstat(fd, &status) || (int64_t)status.st_dev != segment->device || (int64_t)status.st_ino != segment->inode) {
        close(fd);
        return -ESTALE;
    }
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM); /* nothing around what is asked for */
    return fd;
}

/* The same, perhaps opened before. */
static int file_of(reader *self, const engine_segment *segment)
{
    size_t place = (uintptr_t)segment / sizeof *segment % FILES;
    if (self->files[place].segment != segment) {
        if (self->files[place].segment && self->files[place].fd >= 0)
            close(self->files[place].fd);
        self->files[place].segment = segment;
        self->files[place].fd = opened(segment);
    }
    return self->files[place].fd;
}

void file_end(reader *self)
{
    for (size_t place = 0; place < FILES; place++)
        if (self->files[place].segment && self->files[place].fd >= 0)
            close(self->files[place].fd);
}

bool file_opens(reader *self, const engine_segment *segment) { return file_of(self, segment) >= 0; }

/* Returns: true: mapped pages are in memory. For files that can't be asked otherwise. */
static bool is_resident(const engine_segment *segment, int64_t at, int64_t nbytes)
{
    int64_t page = page_bytes(), start = (int64_t)segment->base + at, end = start + nbytes;
    unsigned char pages[MAX_LOOKED_PAGES];
    if (!segment->base)
        return false;
    for (start -= start % page; start < end; start += MAX_LOOKED_PAGES * page) {
        int64_t count = least(MAX_LOOKED_PAGES, (end - start + page - 1) / page);
        if (mincore((void *)start, (size_t)(count * page), pages))
            return false;
        for (int64_t i = 0; i < count; i++)
            if (!(pages[i] & 1))
                return false;
    }
    return true;
}

int file_peek(reader *self, const engine_segment *segment, int64_t at, uint8_t *out, int64_t nbytes)
{
    int fd = file_of(self, segment);
    if (fd >= 0) {
        struct iovec to = {out, (size_t)nbytes};
        ssize_t done = preadv2(fd, &to, 1, at, RWF_NOWAIT);
        if (done >= 0 || (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL))
            return done == nbytes;
    }
    return is_resident(segment, at, nbytes) && !file_read(self, segment, at, out, nbytes);
}

void file_ask(reader *self, const engine_segment *segment, int64_t at, int64_t nbytes)
{
    int fd = file_of(self, segment);
    int64_t end = at + nbytes;
    at -= at % page_bytes(); /* so that none of these has a page more */
    for (; fd >= 0 && at < end; at += ENGINE_PIECE_BYTES) /* more is cut short, in silence */
        readahead(fd, at, (size_t)least(ENGINE_PIECE_BYTES, end - at));
}

int file_read(reader *self, const engine_segment *segment, int64_t at, uint8_t *out, int64_t nbytes)
{
    int fd = file_of(self, segment);
    if (fd < 0 && segment->base) {
        memcpy(out, segment->base + at, (size_t)nbytes);
        return 0;
    }
    if (fd < 0)
        return -fd;
    while (nbytes > 0) {
        ssize_t done = pread(fd, out, (size_t)nbytes, at);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return done ? errno : -1;
        out += done;
        at += done;
        nbytes -= done;
    }
    return 0;
}

void file_drop(reader *self, const engine_segment *segment, int64_t at, int64_t nbytes)
{
    int fd = file_of(self, segment);
    int64_t page = page_bytes(), start = at - at % page, end = (at + nbytes) / page * page;
    if (fd >= 0 && start < end) /* else all there is: 0 bytes are the whole file */
        posix_fadvise(fd, start, end - start, POSIX_FADV_DONTNEED);
}
