/* Strided blocks straight to and from a stream socket, one system call for many runs. Runs that lie side by side
 * are one run. Short ones are received into a stage that stays in the cache and put in their places by streaming
 * stores: that is a sixth faster than to have the kernel put them there; what is sent gains nothing by a stage. */
#define _GNU_SOURCE
#include "kernels.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define SHORT_RUN 4096     /* bytes; shorter runs are staged */
#define STAGE (128 * 1024) /* bytes; with the places that it is copied to it stays in the second-level cache */
#define RUNS 1024          /* of one system call: the kernel takes no longer vector */

/* What one system call moves, in the order of the stream. */
typedef struct {
    struct iovec runs[RUNS];   /* where they belong */
    struct iovec vector[RUNS]; /* where the kernel takes or puts them; staged neighbours are one entry */
    int count, entries;
    int64_t used; /* bytes of the stage */
    char stage[STAGE];
} batch;

/* Where the walk through the table stands: the leader of a gang, an index in it, a member, and bytes of its run
 * already done; and where every member's run of that index lies. */
typedef struct {
    const copy_entry *entries;
    const uintptr_t *buffers;
    int receive;
    int64_t count, entry, member, within;
    int64_t at[MAX_DIMS];
    char *place[MAX_GANG];
    const int64_t *stride[MAX_GANG];
} cursor;

static int64_t runs_of(const copy_entry *e)
{
    int64_t n = 1;
    for (int64_t d = 0; d < e->ndim; d++)
        n *= e->shape[d];
    return n;
}

/* Finds the runs of a gang that the cursor has come to, at its index. */
static void settle(cursor *c)
{
    for (int64_t g = 0; c->entry < c->count && g < c->entries[c->entry].gang; g++) {
        const copy_entry *m = &c->entries[c->entry + g];
        const int64_t *stride = c->receive ? m->target_stride : m->source_stride;
        int64_t offset = c->receive ? m->target_offset : m->source_offset;
        for (int64_t d = 0; d < m->ndim; d++)
            offset += c->at[d] * stride[d];
        c->place[g] = (char *)c->buffers[c->receive ? m->target : m->source] + offset;
        c->stride[g] = stride;
    }
}

/* Moves a fresh cursor `skip` bytes into the stream. */
static void seek(cursor *c, int64_t skip)
{
    while (c->entry < c->count) {
        const copy_entry *e = &c->entries[c->entry];
        int64_t total = runs_of(e) * e->gang * e->run;
        if (skip < total)
            break;
        skip -= total;
        c->entry += e->gang;
    }
    if (c->entry == c->count)
        return;
    const copy_entry *e = &c->entries[c->entry];
    int64_t index = skip / (e->run * e->gang);
    c->member = skip / e->run % e->gang;
    c->within = skip % e->run;
    for (int64_t d = e->ndim - 1; d >= 0; d--) {
        c->at[d] = index % e->shape[d];
        index /= e->shape[d];
    }
    settle(c);
}

static void next_run(cursor *c, const copy_entry *e)
{
    c->within = 0;
    if (++c->member < e->gang)
        return;
    c->member = 0;
    for (int64_t d = e->ndim - 1; d >= 0; d--) {
        int64_t steps = ++c->at[d] < e->shape[d] ? 1 : 1 - e->shape[d];
        for (int64_t g = 0; g < e->gang; g++)
            c->place[g] += steps * c->stride[g][d];
        if (steps == 1)
            return;
        c->at[d] = 0;
    }
    c->entry += e->gang;
    settle(c);
}

/* The next run, with what lies right behind it, at most `limit` bytes; 0 at the end of the table. */
static int64_t take_run(cursor *c, int64_t limit, char **at)
{
    int64_t length = 0;
    while (c->entry < c->count && length < limit) {
        const copy_entry *e = &c->entries[c->entry];
        char *start = c->place[c->member] + c->within;
        if (length == 0)
            *at = start;
        else if (*at + length != start)
            break;
        int64_t n = e->run - c->within;
        if (n > limit - length) {
            c->within += limit - length;
            return limit;
        }
        length += n;
        next_run(c, e);
    }
    return length;
}

static int is_staged(int receive, int64_t length)
{
    return receive && length < SHORT_RUN;
}

/* Fills the batch with at most `limit` bytes from the cursor on. */
static void fill(batch *b, cursor *c, int64_t limit)
{
    b->count = b->entries = 0;
    b->used = 0;
    while (b->count < RUNS && b->used + SHORT_RUN <= STAGE) {
        char *at = NULL;
        int64_t length = take_run(c, limit, &at);
        if (length == 0)
            return;
        b->runs[b->count++] = (struct iovec){at, (size_t)length};
        limit -= length;
        if (is_staged(c->receive, length)) {
            at = b->stage + b->used;
            b->used += length;
        }
        struct iovec *last = b->entries > 0 ? &b->vector[b->entries - 1] : NULL;
        if (last != NULL && (char *)last->iov_base + last->iov_len == at)
            last->iov_len += (size_t)length;
        else
            b->vector[b->entries++] = (struct iovec){at, (size_t)length};
    }
}

/* Puts what has arrived in the stage where it belongs; `moved` bytes of the batch are here. */
static void unstage(const batch *b, int64_t moved, int streaming)
{
    const char *from = b->stage;
    for (int i = 0; i < b->count && moved > 0; i++) {
        int64_t whole = (int64_t)b->runs[i].iov_len, length = whole < moved ? whole : moved;
        if (is_staged(1, whole)) {
            copy_run(b->runs[i].iov_base, from, length, streaming);
            from += length;
        }
        moved -= length;
    }
}

/* One system call after the other until the batch is moved; bytes, and an errno where that isn't all. */
static int64_t move_all(int fd, int receive, batch *b, int *error)
{
    int64_t done = 0;
    int first = 0;
    while (first < b->entries) {
        struct msghdr message = {.msg_iov = b->vector + first, .msg_iovlen = (size_t)(b->entries - first)};
        ssize_t moved = receive ? recvmsg(fd, &message, MSG_WAITALL) : sendmsg(fd, &message, MSG_NOSIGNAL);
        if (moved <= 0) {
            *error = moved < 0 ? errno : ECONNRESET; /* the end of the stream, in the middle of it */
            return done;
        }
        done += moved;
        for (; first < b->entries && (size_t)moved >= b->vector[first].iov_len; first++)
            moved -= (ssize_t)b->vector[first].iov_len;
        if (first < b->entries) {
            b->vector[first].iov_base = (char *)b->vector[first].iov_base + moved;
            b->vector[first].iov_len -= (size_t)moved;
        }
    }
    return done;
}

int64_t run_stream(int fd, int receive, const copy_entry *entries, int64_t count, const uintptr_t *buffers,
                   int64_t skip, int64_t limit, int *error)
{
    cursor c = {.entries = entries, .buffers = buffers, .receive = receive, .count = count};
    int64_t done = 0;
    int streaming = has_avx2();
    batch *b = malloc(sizeof *b); /* too large for the stacks of some systems' threads */
    *error = b == NULL ? ENOMEM : 0;
    if (b == NULL)
        return 0;
    seek(&c, skip);
    while (*error == 0) {
        fill(b, &c, limit - done);
        if (b->count == 0)
            break;
        int64_t moved = move_all(fd, receive, b, error);
        if (receive)
            unstage(b, moved, streaming);
        done += moved;
    }
    if (receive)
        finish_streaming(streaming);
    free(b);
    return done;
}
