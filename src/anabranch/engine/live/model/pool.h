/* A thread pool whose caller never waits for a thread that has not begun to help.
 *
 * The caller and the helpers claim items of a job one by one; the caller returns when all items are done. A helper that
 * the system is not running delays nothing but an item it holds, unlike a barrier. Idle helpers spin briefly, then sleep.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

enum { SPINS = 4000, MAX_HELPERS = 255 };
typedef void (*Work)(const void *context, int item, void *scratch);

typedef struct {
    _Alignas(64) _Atomic uint64_t ticket; /* job number << 32 | items not yet claimed */
    _Alignas(64) _Atomic int done;
    _Alignas(64) _Atomic int sleepers;
    _Atomic int closing;
    Work work;
    const void *context;
    size_t scratch_bytes;
    void *scratch; /* the caller's */
    int helpers;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t threads[MAX_HELPERS];
} Pool;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Claim and do one item of the current job; 0 if none is left. Holding an item keeps the job's fields in place. */
static int help(Pool *p, void *scratch) {
    uint64_t ticket = atomic_load_explicit(&p->ticket, memory_order_acquire);
    do {
        if ((uint32_t)ticket == 0) return 0;
    } while (!atomic_compare_exchange_weak_explicit(&p->ticket, &ticket, ticket - 1, memory_order_acq_rel,
                                                    memory_order_acquire));
    p->work(p->context, (int)(uint32_t)ticket - 1, scratch);
    atomic_fetch_add_explicit(&p->done, 1, memory_order_release);
    return 1;
}

static void sleep_until_work(Pool *p) {
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->sleepers, 1);
    while ((uint32_t)atomic_load(&p->ticket) == 0 && !atomic_load(&p->closing)) pthread_cond_wait(&p->wake, &p->lock);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->lock);
}

static void *helper(void *argument) {
    Pool *p = argument;
    void *scratch = aligned_alloc(64, p->scratch_bytes);
    int idle = 0;
    while (scratch && !atomic_load_explicit(&p->closing, memory_order_relaxed)) {
        if (help(p, scratch)) {
            idle = 0;
        } else if (++idle < SPINS) {
            relax();
        } else {
            sleep_until_work(p);
            idle = 0;
        }
    }
    free(scratch);
    return NULL;
}

/* Run work(context, 0 … count-1), in any order, on the caller and the helpers. One caller at a time. */
static void parallel(Pool *p, Work work, const void *context, int count) {
    if (count <= 0) return;
    p->work = work;
    p->context = context;
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    uint64_t job = (atomic_load_explicit(&p->ticket, memory_order_relaxed) >> 32) + 1;
    atomic_store(&p->ticket, job << 32 | (uint32_t)count);
    if (count > 1 && atomic_load(&p->sleepers)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
    }
    while (help(p, p->scratch)) {}
    for (int spins = 0; atomic_load_explicit(&p->done, memory_order_acquire) < count; spins++) {
        if (spins < SPINS) relax();
        else sched_yield();
    }
}

/* Ends the helpers. */
void pool_close(Pool *p) {
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->closing, 1);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->helpers; i++) pthread_join(p->threads[i], NULL);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->wake);
    free(p->scratch);
    free(p);
}

/* `threads` counts the caller. NULL without memory; fewer helpers if the system gives no more threads. */
static Pool *pool_with_scratch(int threads, size_t scratch_bytes) {
    Pool *p = aligned_alloc(64, (sizeof(Pool) + 63) / 64 * 64);
    if (!p) return NULL;
    *p = (Pool){.scratch_bytes = (scratch_bytes + 63) / 64 * 64};
    p->scratch = aligned_alloc(64, p->scratch_bytes);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    if (!p->scratch) {
        pool_close(p);
        return NULL;
    }
    for (int i = 0; i < threads - 1 && i < MAX_HELPERS; i++) {
        if (pthread_create(p->threads + i, NULL, helper, p)) break;
        p->helpers++;
    }
    return p;
}
