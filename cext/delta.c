/* Compare and compaction. A buffer is cut into blocks; a thread compacts a block into its own work space and copies
 * the entries to their place once the blocks before have been counted, so the result is dense and sorted whatever
 * the number of threads. Nobody waits for a slower thread as long as there is work space. */
#include "delta.h"
#include "kernels.h"
#include "scan.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 32768       /* elements; a multiple of 32 */
#define RUN 8             /* blocks that a thread takes at a time, where there are many: long streams read faster */
#define SPACE (4 * BLOCK) /* elements per stream of a thread's work space */
#define PENDING 64        /* blocks of a thread that may wait for their place */

/* What a block gives: positions, new and old bits; or coded gaps (all but the first), values and escapes. */
enum { STREAMS = 3, COUNT = 1 }; /* the second stream has one element per entry */

typedef struct {
    char *data; /* may be NULL */
    int64_t room;
    int64_t size; /* bytes of an element */
} stream;

typedef struct {
    int64_t lengths[STREAMS];
    uint64_t first, last; /* positions */
    int done;
} summary;

typedef struct {
    int64_t next __attribute__((aligned(64))); /* the block to take */
    const char *old __attribute__((aligned(64)));
    const char *new;
    const uint32_t *mask;
    int64_t n, blocks, run;
    int itemsize;
    int coded, kind; /* u8 gaps and values of a kind, instead of entries */
    stream out[STREAMS];
    summary *found; /* per block */
} job;

/* Where the next block's elements go; a thread passes all blocks in order, its own and the others'. */
typedef struct {
    int64_t block, at[STREAMS];
    uint64_t next; /* one past the last entry so far */
} place;

typedef struct {
    int64_t block, start[STREAMS];
} waiting;

typedef struct {
    char *memory, *streams[STREAMS];
    entries scratch; /* coded only: the block's entries before they are coded */
    int64_t used[STREAMS];
    waiting pending[PENDING];
    int64_t first, count; /* of pending, a ring */
    place place;
} workspace;

static int64_t first_gap(const job *j, const place *p, const summary *s)
{
    return j->coded && s->lengths[COUNT] ? (int64_t)(s->first - p->next) : -1;
}

static void pass_block(const job *j, place *p)
{
    const summary *s = &j->found[p->block++];
    int64_t gap = first_gap(j, p, s);
    if (gap >= 0)
        p->at[0] += gap / 255 + 1, p->next = s->last + 1;
    for (int k = 0; k < STREAMS; k++)
        p->at[k] += s->lengths[k];
}

static void store_stream(const stream *to, int64_t offset, const char *from, int64_t count)
{
    int64_t n = to->room - offset < count ? to->room - offset : count;
    if (n > 0 && to->data)
        memcpy(to->data + offset * to->size, from, (size_t)(n * to->size));
}

/* Returns the bytes of the gap's code. */
static int64_t store_gap(const stream *to, int64_t at, int64_t gap)
{
    int64_t start = at;
    for (; gap >= 255; gap -= 255, at++)
        if (at < to->room)
            to->data[at] = (char)255;
    if (at < to->room)
        to->data[at] = (char)gap;
    return at + 1 - start;
}

static void store_block(const job *j, const place *p, const workspace *w, const waiting *block)
{
    const summary *s = &j->found[p->block];
    int64_t gap = first_gap(j, p, s), offset = gap >= 0 ? store_gap(&j->out[0], p->at[0], gap) : 0;
    for (int k = 0; k < STREAMS; k++)
        store_stream(&j->out[k], p->at[k] + (k == 0 ? offset : 0), w->streams[k] + block->start[k] * j->out[k].size,
                     s->lengths[k]);
}

/* Copies to their place what can be; frees the work space if nothing is left in it. */
static void store_counted(const job *j, workspace *w)
{
    for (; w->count; w->first = (w->first + 1) % PENDING, w->count--) {
        const waiting *block = &w->pending[w->first];
        for (; w->place.block < block->block; pass_block(j, &w->place))
            if (!__atomic_load_n(&j->found[w->place.block].done, __ATOMIC_ACQUIRE))
                return;
        store_block(j, &w->place, w, block);
        pass_block(j, &w->place);
    }
    memset(w->used, 0, sizeof w->used);
}

static int has_space(const workspace *w)
{
    int64_t most = 0;
    for (int k = 0; k < STREAMS; k++)
        most = w->used[k] > most ? w->used[k] : most;
    return w->count < PENDING && most + 2 * BLOCK <= SPACE;
}

static void wait_until_stored(const job *j, workspace *w, int everything)
{
    for (int spins = 0; store_counted(j, w), everything ? w->count != 0 : !has_space(w); spins++)
        if (spins > 256)
            sched_yield();
}

static int64_t code_gaps(const uint32_t *positions, int64_t count, uint8_t *out)
{
    uint8_t *start = out;
    for (int64_t i = 1; i < count; i++) {
        uint32_t gap = positions[i] - positions[i - 1] - 1;
        for (; gap >= 255; gap -= 255)
            *out++ = 255;
        *out++ = (uint8_t)gap;
    }
    return out - start;
}

/* Codes the values of a block; returns the number of escapes. */
static int64_t code_values(const job *j, int64_t count, entries found, char *values, char *escapes)
{
    if (j->kind == VALUES_ULP)
        return ulp_encode(found.new, found.old, count, j->itemsize, (uint8_t *)values, escapes, count);
    memcpy(values, found.new, (size_t)(count * j->itemsize));
    if (j->kind == VALUES_XOR)
        for (int64_t i = 0; i < count * j->itemsize; i++)
            values[i] ^= found.old[i];
    return 0;
}

static void do_block(const job *j, workspace *w, int64_t block)
{
    char *to[STREAMS];
    summary *s = &j->found[block];
    int64_t begin = block * BLOCK, end = begin + BLOCK < j->n ? begin + BLOCK : j->n;
    for (int k = 0; k < STREAMS; k++)
        to[k] = w->streams[k] + w->used[k] * j->out[k].size;
    entries found = j->coded ? w->scratch : (entries){(uint32_t *)to[0], to[1], j->out[2].data ? to[2] : NULL};
    int64_t count = j->mask ? scan_mask(j->mask, j->new, j->itemsize, begin, end, found)
                            : scan_changed(j->old, j->new, j->itemsize, begin, end, found);
    int64_t lengths[STREAMS] = {count, count, count};
    if (j->coded) {
        lengths[0] = code_gaps(found.positions, count, (uint8_t *)to[0]);
        lengths[2] = code_values(j, count, found, to[1], to[2]);
    }
    if (count)
        s->first = found.positions[0], s->last = found.positions[count - 1];
    waiting *mine = &w->pending[(w->first + w->count++) % PENDING];
    mine->block = block;
    for (int k = 0; k < STREAMS; k++) {
        s->lengths[k] = lengths[k];
        mine->start[k] = w->used[k];
        w->used[k] += lengths[k];
    }
    __atomic_store_n(&s->done, 1, __ATOMIC_RELEASE);
}

static int make_workspace(const job *j, workspace *w)
{
    size_t item = (size_t)j->itemsize, scratch = j->coded ? BLOCK * (sizeof(uint32_t) + 2 * item) : 0;
    size_t total = scratch;
    for (int k = 0; k < STREAMS; k++)
        total += SPACE * (size_t)j->out[k].size;
    *w = (workspace){.memory = malloc(total)};
    char *rest = w->memory;
    if (!rest)
        return 0;
    if (j->coded)
        w->scratch = (entries){(uint32_t *)rest, rest + BLOCK * sizeof(uint32_t),
                               rest + BLOCK * (sizeof(uint32_t) + item)};
    rest += scratch;
    for (int k = STREAMS - 1; k >= 0; k--) /* the narrow gaps last: all others stay aligned */
        w->streams[k] = rest, rest += SPACE * j->out[k].size;
    return 1;
}

static void work(void *state, int64_t thread)
{
    (void)thread;
    job *j = state;
    workspace w;
    if (!make_workspace(j, &w))
        return; /* the other threads do this one's share */
    for (;;) {
        int64_t block = __atomic_fetch_add(&j->next, j->run, __ATOMIC_RELAXED), end = block + j->run;
        if (block >= j->blocks)
            break;
        for (; block < end && block < j->blocks; block++) {
            wait_until_stored(j, &w, 0);
            do_block(j, &w, block);
        }
    }
    wait_until_stored(j, &w, 1);
    free(w.memory);
}

/* The ends of the streams; -1 in `block` if there was no memory. */
static place run_job(job *j, int threads)
{
    place p = {.block = -1};
    j->blocks = (j->n + BLOCK - 1) / BLOCK;
    j->run = j->blocks / (threads > 1 ? 16 * threads : 1);
    j->run = j->run < 1 ? 1 : j->run > RUN ? RUN : j->run;
    j->found = calloc((size_t)j->blocks + 1, sizeof *j->found);
    if (!j->found)
        return p;
    parallel_for(work, j, threads > 1 ? threads : 1, threads);
    if (j->next >= j->blocks) /* else no thread had memory */
        for (p.block = 0; p.block < j->blocks;)
            pass_block(j, &p);
    free(j->found);
    return p;
}

static int64_t compact(job *j, uint32_t *positions, void *new_out, void *old_out, int64_t room, int threads)
{
    j->out[0] = (stream){(char *)positions, room, sizeof *positions};
    j->out[1] = (stream){new_out, room, j->itemsize};
    j->out[2] = (stream){old_out, room, j->itemsize};
    place end = run_job(j, threads);
    return end.block < 0 ? REFUSED_MEMORY : end.at[COUNT];
}

int64_t delta_compare(const void *old, const void *new, int64_t n, int itemsize, uint32_t *positions, void *new_out,
                      void *old_out, int64_t room, int threads)
{
    job j = {.old = old, .new = new, .n = n, .itemsize = itemsize};
    return compact(&j, positions, new_out, old_out, room, threads);
}

int64_t delta_mask(const uint32_t *words, const void *new, int64_t n, int itemsize, uint32_t *positions,
                   void *new_out, int64_t room, int threads)
{
    job j = {.mask = words, .new = new, .n = n, .itemsize = itemsize};
    return compact(&j, positions, new ? new_out : NULL, NULL, room, threads);
}

/* The fused form: a block's gaps and values are coded where it was compared; only the gap of its first entry waits
 * for the block before. */
int delta_fused(const void *old, const void *new, int64_t n, int itemsize, int kind, uint8_t *gaps, int64_t gap_room,
                void *values, int64_t value_room, void *escapes, int64_t escape_room, int threads, fused_size *size)
{
    job j = {.old = old, .new = new, .n = n, .itemsize = itemsize, .coded = 1, .kind = kind};
    j.out[0] = (stream){(char *)gaps, gap_room, 1};
    j.out[1] = (stream){values, value_room, kind == VALUES_ULP ? 1 : itemsize};
    j.out[2] = (stream){escapes, escape_room, itemsize};
    place end = run_job(&j, threads);
    *size = (fused_size){end.at[1], end.at[0], end.at[2]};
    return end.block < 0 ? REFUSED_MEMORY : 0;
}
