/* See maps.h. */
#define _GNU_SOURCE
#include "maps.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))

static const uintptr_t HUGE_PAGE = 2 << 20;

static int64_t mapped; /* files */

static int opened(const char *path)
{
    int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK; /* a pipe may have its name by now */
    int fd = open(path, flags | O_NOATIME);
    return fd < 0 && errno == EPERM ? open(path, flags) : fd; /* it is another user's */
}

/* Map a file from a huge page on. */
static uint8_t *map_aligned(int fd, size_t nbytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), length = (nbytes + page - 1) / page * page;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    uint8_t *reserved = mmap(NULL, length + HUGE_PAGE, PROT_NONE, flags, -1, 0);
    if (reserved == MAP_FAILED)
        return reserved;
    size_t before = -(uintptr_t)reserved % HUGE_PAGE;
    uint8_t *address = mmap(reserved + before, nbytes, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0);
    if (address == MAP_FAILED) {
        int error = errno;
        munmap(reserved, length + HUGE_PAGE);
        errno = error;
        return address;
    }
    if (before)
        munmap(reserved, before);
    munmap(address + length, HUGE_PAGE - before);
    return address;
}

PUBLIC int64_t maps_map(maps_file *file)
{
    if (file->address)
        return 0;
    size_t nbytes = (size_t)file->nbytes;
    uint8_t *address = nbytes < HUGE_PAGE ? mmap(NULL, nbytes, PROT_READ, MAP_PRIVATE, (int)file->fd, 0)
                                          : map_aligned((int)file->fd, nbytes);
    if (address == MAP_FAILED)
        return errno;
    madvise(address, nbytes, MADV_DONTFORK);
    madvise(address, nbytes, MADV_RANDOM);
    __atomic_fetch_add(&mapped, 1, __ATOMIC_RELAXED);
    file->address = address;
    return 0;
}

static int64_t closed(maps_file *file, int64_t error)
{
    maps_close(file);
    return error;
}

PUBLIC int64_t maps_open(maps_file *file, int64_t limit, int64_t most)
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
    if (maps_count() >= most)
        return 0;
    int64_t error = maps_map(file);
    return error && error != ENOMEM ? closed(file, error) : 0;
}

PUBLIC void maps_close(maps_file *file)
{
    int fd = (int)file->fd;
    file->fd = -1; /* first: once it is closed, the number is anybody's */
    if (fd >= 0)
        close(fd);
}

PUBLIC int64_t maps_unmap(maps_file *const *files, int64_t count)
{
    int64_t error = 0;
    for (int64_t i = 0; i < count; i++) {
        maps_close(files[i]);
        uint8_t *address = files[i]->address;
        if (!address)
            continue;
        files[i]->address = NULL;
        if (munmap(address, (size_t)files[i]->nbytes)) {
            error = errno;
            files[i]->address = address;
        } else
            __atomic_fetch_sub(&mapped, 1, __ATOMIC_RELAXED);
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
}
