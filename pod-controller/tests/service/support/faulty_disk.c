/* Stands before the C library in one process, and makes the disk below one of its files full or slow.
 *
 * FAULTY_FILE is that file. FAULTY_HOW is a file that says what is wrong with the disk just now: "full", "slow MILLISECONDS",
 * or nothing if it is not there.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static int concerns(int fd)
{
    struct stat one, other;
    const char *file = getenv("FAULTY_FILE");
    return file && fstat(fd, &one) == 0 && stat(file, &other) == 0 && one.st_ino == other.st_ino &&
           one.st_dev == other.st_dev;
}

/* What is wrong: -1 for a full disk, else by how many milliseconds it is slow. */
static int fault(int fd)
{
    char text[32] = "";
    int saved = errno, milliseconds = 0;
    const char *how = getenv("FAULTY_HOW");
    int said = how && concerns(fd) ? open(how, O_RDONLY | O_CLOEXEC) : -1;
    if (said >= 0) {
        if (read(said, text, sizeof text - 1) > 0 && strncmp(text, "full", 4) == 0)
            milliseconds = -1;
        else
            sscanf(text, "slow %d", &milliseconds);
        close(said);
    }
    errno = saved;
    return milliseconds;
}

static int full(int fd)
{
    if (fault(fd) >= 0)
        return 0;
    errno = ENOSPC;
    return 1;
}

static void dawdle(int fd)
{
    int milliseconds = fault(fd);
    if (milliseconds > 0) {
        struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
        nanosleep(&time, NULL);
    }
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t at)
{
    return full(fd) ? -1 : NEXT(pwrite64)(fd, bytes, count, at);
}

ssize_t pwrite(int fd, const void *bytes, size_t count, off_t at)
{
    return full(fd) ? -1 : NEXT(pwrite)(fd, bytes, count, at);
}

int ftruncate64(int fd, off64_t length)
{
    return full(fd) ? -1 : NEXT(ftruncate64)(fd, length);
}

int fsync(int fd)
{
    dawdle(fd);
    return full(fd) ? -1 : NEXT(fsync)(fd);
}

int fdatasync(int fd)
{
    dawdle(fd);
    return full(fd) ? -1 : NEXT(fdatasync)(fd);
}
