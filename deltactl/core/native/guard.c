/* Files that shrink, or whose storage fails, while they are mapped.
 *
 * To touch a page of a mapped file that is not there any more raises SIGBUS, which ends the process
 * without a word. Here whoever maps a file says where; of a fault in there the handler maps zeros
 * over the rest of the file and takes a note, and the reader goes on, in whatever code it is, to
 * where the note is looked at (deltactl/files/mapped.py). A fault anywhere else is for whoever
 * handled the signal before us, as if we were not there.
 *
 * Plain C11 without Python's headers, called through ctypes. The handler runs on the thread that
 * faulted, perhaps in the middle of anything: it reads and writes atomics, and calls mmap, sigaction
 * and raise. Ranges are written by one thread at a time, which is for the caller to see to.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST 65536 /* ranges at once; pages of the table that were never used take no memory */

typedef struct {
    _Atomic uintptr_t start, stop; /* whole pages; a stop of 0: the range is free */
    atomic_int hit;
} range;

static range ranges[MOST];
static atomic_int used; /* ranges below this have been in use at some time */
static struct sigaction before;
static uintptr_t page_size;

/* Raised whenever a signature changes: an old build beside new code is not used. */
int deltactl_guard_version(void) { return 1; }

/* Where the ranges end that an address is in; 0: it is in none. One that is given up or taken
 * anew while it is looked at is none. */
static uintptr_t end_of(uintptr_t at) {
    int count = atomic_load(&used);
    uintptr_t end = 0;
    for (range *one = ranges; one < ranges + count; one++) {
        uintptr_t stop = atomic_load(&one->stop), start = atomic_load(&one->start);
        if (start <= at && at < stop && stop > end && atomic_load(&one->stop) == stop) end = stop;
    }
    return end;
}

/* Take a note at every range that has a part of these pages. */
static void note(uintptr_t start, uintptr_t stop) {
    int count = atomic_load(&used);
    for (range *one = ranges; one < ranges + count; one++)
        if (atomic_load(&one->start) < stop && start < atomic_load(&one->stop))
            atomic_store(&one->hit, 1);
}

static void pass_on(int signal, siginfo_t *info, void *context) {
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
        sigaction(signal, &before, NULL);
        if (before.sa_handler == SIG_DFL) raise(signal); /* once this handler has returned */
    } else {
        before.sa_handler(signal);
    }
}

static void on_fault(int signal, siginfo_t *info, void *context) {
    int error = errno;
    uintptr_t at = (uintptr_t)info->si_addr, start = at & ~(page_size - 1);
    /* Only what the kernel itself sends has an address; kill(2) sends the signal too. */
    uintptr_t stop = info->si_code > 0 ? end_of(at) : 0;
    void *zeros = MAP_FAILED;
    if (stop) {
        note(start, stop); /* first: another thread may read the zeros at once */
        zeros = mmap((void *)start, stop - start, PROT_READ,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    }
    errno = error;
    if (zeros == MAP_FAILED) pass_on(signal, info, context);
}

/* Handle the signal from now on. To be called once; 0, or an errno. */
int deltactl_guard_install(void) {
    page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGBUS, NULL, &before) || sigaction(SIGBUS, &ours, NULL) ? errno : 0;
}

/* Watch over the pages of `size` bytes from `at` on: the range's number, or -1 where there is no
 * room for it. To be let go of before anything else can come to lie there. */
int deltactl_guard_watch(uintptr_t at, uintptr_t size) {
    for (int k = 0; k < MOST; k++) {
        if (atomic_load(&ranges[k].stop)) continue;
        if (k >= atomic_load(&used)) atomic_store(&used, k + 1);
        atomic_store(&ranges[k].hit, 0);
        atomic_store(&ranges[k].start, at & ~(page_size - 1));
        atomic_store(&ranges[k].stop, (at + size + page_size - 1) & ~(page_size - 1));
        return k;
    }
    return -1;
}

/* Whether zeros stand for a part of the range. */
int deltactl_guard_hit(int k) { return atomic_load(&ranges[k].hit); }

void deltactl_guard_release(int k) { atomic_store(&ranges[k].stop, 0); }
