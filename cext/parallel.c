/* A parallel loop over a table: threads take the next index until none is left. */
#include "kernels.h"

#include <pthread.h>

#define MAX_THREADS 64

typedef struct {
    void (*work)(void *, int64_t);
    void *state;
    int64_t count, next;
} loop;

static void *take(void *argument)
{
    loop *l = argument;
    for (;;) {
        int64_t i = __atomic_fetch_add(&l->next, 1, __ATOMIC_RELAXED);
        if (i >= l->count)
            return NULL;
        l->work(l->state, i);
    }
}

void parallel_for(void (*work)(void *state, int64_t index), void *state, int64_t count, int threads)
{
    loop l = {.work = work, .state = state, .count = count, .next = 0};
    pthread_t started[MAX_THREADS];
    int n = 0;
    if (threads > MAX_THREADS)
        threads = MAX_THREADS;
    /* A thread that can't be started is no error: the others do its share. */
    while (n < threads - 1 && n < count - 1 && pthread_create(&started[n], NULL, take, &l) == 0)
        n++;
    take(&l);
    while (n > 0)
        pthread_join(started[--n], NULL);
}
