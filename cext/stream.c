/* Strided blocks straight to and from a stream socket: no packing, one system call per many runs. */
#define _GNU_SOURCE
#include "kernels.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define VECTOR 512 /* entries of one system call: a good part of a megabyte where runs are a kilobyte */

/* Where the walk through the table stands: an entry, an index in it, and bytes of the run already done. */
typedef struct {
    const copy_entry *entries;
    int64_t count, entry, within;
    int64_t at[MAX_DIMS];
} cursor;

static int64_t runs_of(const copy_entry *e)
{
    int64_t n = 1;
    for (int64_t d = 0; d < e->ndim; d++)
        n *= e->shape[d];
    return n;
}

/* Moves a fresh cursor `skip` bytes into the stream. */
static void seek(cursor *c, int64_t skip)
{
    while (c->entry < c->count) {
        const copy_entry *e = &c->entries[c->entry];
        int64_t total = runs_of(e) * e->run;
        if (skip < total)
            break;
        skip -= total;
        c->entry++;
    }
    if (c->entry == c->count)
        return;
    const copy_entry *e = &c->entries[c->entry];
    int64_t index = skip / e->run;
    c->within = skip % e->run;
    for (int64_t d = e->ndim - 1; d >= 0; d--) {
        c->at[d] = index % e->shape[d];
        index /= e->shape[d];
    }
}

static void next_run(cursor *c, const copy_entry *e)
{
    c->within = 0;
    for (int64_t d = e->ndim - 1; d >= 0; d--) {
        if (++c->at[d] < e->shape[d])
            return;
        c->at[d] = 0;
    }
    c->entry++;
}

/* Fills the vector with at most `limit` bytes from the cursor on; neighbours become one entry. */
static int fill(cursor *c, struct iovec *vector, const uintptr_t *buffers, int receive, int64_t limit)
{
    int n = 0;
    while (c->entry < c->count && limit > 0) {
        const copy_entry *e = &c->entries[c->entry];
        const int64_t *stride = receive ? e->target_stride : e->source_stride;
        int64_t offset = receive ? e->target_offset : e->source_offset;
        for (int64_t d = 0; d < e->ndim; d++)
            offset += c->at[d] * stride[d];
        char *start = (char *)buffers[receive ? e->target : e->source] + offset + c->within;
        int64_t length = e->run - c->within;
        int whole = length <= limit;
        if (!whole)
            length = limit;
        if (n > 0 && (char *)vector[n - 1].iov_base + vector[n - 1].iov_len == start)
            vector[n - 1].iov_len += (size_t)length;
        else if (n == VECTOR)
            return n;
        else
            vector[n++] = (struct iovec){start, (size_t)length};
        limit -= length;
        if (whole)
            next_run(c, e);
        else
            c->within += length;
    }
    return n;
}

int64_t run_stream(int fd, int receive, const copy_entry *entries, int64_t count, const uintptr_t *buffers,
                   int64_t skip, int64_t limit, int *error)
{
    struct iovec vector[VECTOR];
    cursor c = {.entries = entries, .count = count};
    int64_t done = 0;
    *error = 0;
    seek(&c, skip);
    for (;;) {
        int n = fill(&c, vector, buffers, receive, limit - done), first = 0;
        if (n == 0)
            return done;
        while (first < n) {
            struct msghdr message = {.msg_iov = vector + first, .msg_iovlen = (size_t)(n - first)};
            ssize_t moved = receive ? recvmsg(fd, &message, MSG_WAITALL) : sendmsg(fd, &message, MSG_NOSIGNAL);
            if (moved <= 0) {
                *error = moved < 0 ? errno : ECONNRESET; /* the end of the stream, in the middle of it */
                return done;
            }
            done += moved;
            for (; first < n && (size_t)moved >= vector[first].iov_len; first++)
                moved -= (ssize_t)vector[first].iov_len;
            if (first < n) {
                vector[first].iov_base = (char *)vector[first].iov_base + moved;
                vector[first].iov_len -= (size_t)moved;
            }
        }
    }
}
