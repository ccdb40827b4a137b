/* Posting on a queue pair: batches of RDMA WRITEs in chains, and receives for immediates. */
#include "verbs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>

#define SELF(object) ((qp_object *)(object))

enum { ENTRY_WORDS = 3, RELEASE_GIL_FROM = 16 };

typedef struct {
    const uint64_t *entries; /* local offset, remote offset, length */
    uint64_t local, remote, first, count, entry_count; /* of this call: first entry, work requests to post */
    uint32_t lkey, rkey, imm;
    uint32_t signal_every;
    uint64_t seq; /* of the first work request */
} job;

static void build(qp_object *self, const job *j, uint64_t at, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t index = j->first + at + i, seq = j->seq + at + i;
        struct vb_send_wr *wr = &self->wrs[i];
        struct vb_sge *sge = &self->sges[i];
        memset(wr, 0, sizeof *wr);
        wr->wr_id = seq;
        wr->next = i + 1 < n ? wr + 1 : NULL;
        wr->wr.rdma.rkey = j->rkey;
        if (seq % j->signal_every == 0 || at + i + 1 == j->count)
            wr->send_flags = VB_SEND_SIGNALED;
        if (index == j->entry_count) { /* the immediate that closes the call: no data, so no entry */
            wr->opcode = VB_WR_RDMA_WRITE_WITH_IMM;
            wr->imm_data = htonl(j->imm);
            wr->wr.rdma.remote_addr = j->remote;
            wr->send_flags = VB_SEND_SIGNALED;
            continue;
        }
        const uint64_t *entry = j->entries + ENTRY_WORDS * index;
        *sge = (struct vb_sge){j->local + entry[0], (uint32_t)entry[2], j->lkey};
        wr->sg_list = sge;
        wr->num_sge = 1;
        wr->opcode = VB_WR_RDMA_WRITE;
        wr->wr.rdma.remote_addr = j->remote + entry[1];
        if (entry[2] <= self->max_inline)
            wr->send_flags |= VB_SEND_INLINE;
    }
}

/* Chains of CHAIN work requests, one doorbell each. Returns how many were accepted. */
static uint64_t post(qp_object *self, const job *j, int *error)
{
    struct vb_context *context = self->owner->context;
    for (uint64_t at = 0; at < j->count;) {
        uint32_t n = j->count - at < CHAIN ? (uint32_t)(j->count - at) : CHAIN;
        struct vb_send_wr *bad = NULL;
        build(self, j, at, n);
        uint64_t before = ns_now();
        errno = 0;
        int rc = context->ops.post_send(self->qp, self->wrs, &bad);
        qp_count_ns(self->post_ns, ns_now() - before);
        self->post_calls++;
        if (rc) {
            *error = rc > 0 ? rc : errno ? errno : EIO;
            return at + (bad ? (uint64_t)(bad - self->wrs) : 0);
        }
        at += n;
    }
    return j->count;
}

/* All of them where a call begins with the first, else only those that may be posted now: a long table that goes
 * out in many calls isn't read as often. */
static int check_entries(const qp_object *self, const region_object *region, const Py_buffer *buffer,
                         uint64_t remote_bytes, uint64_t start)
{
    const uint64_t *entries = buffer->buf;
    uint64_t local_bytes = region->mr->length, count = (uint64_t)buffer->len / (ENTRY_WORDS * sizeof(uint64_t));
    if ((uintptr_t)entries % sizeof(uint64_t) || (uint64_t)buffer->len % (ENTRY_WORDS * sizeof(uint64_t))) {
        PyErr_SetString(PyExc_ValueError, "entries are aligned rows of three uint64: local, remote, length");
        return -1;
    }
    uint64_t end = start && start < count && count - start > self->max_send ? start + self->max_send : count;
    for (uint64_t i = start; i < end; i++) {
        const uint64_t *e = entries + ENTRY_WORDS * i;
        if (e[2] && e[2] <= self->max_message && e[2] <= local_bytes && e[0] <= local_bytes - e[2] &&
            e[2] <= remote_bytes && e[1] <= remote_bytes - e[2])
            continue;
        PyErr_Format(PyExc_ValueError,
                     "write %llu of %llu bytes at %llu to %llu: regions have %llu and %llu bytes, a message at most "
                     "%u",
                     (unsigned long long)i, (unsigned long long)e[2], (unsigned long long)e[0],
                     (unsigned long long)e[1], (unsigned long long)local_bytes, (unsigned long long)remote_bytes,
                     self->max_message);
        return -1;
    }
    return 0;
}

/* Numbers, opcodes and the region's count are booked before the first doorbell: completions may overtake us. */
static void book(qp_object *self, const job *j, region_object *region)
{
    for (uint64_t i = 0; i < j->count; i++)
        self->opcodes[(j->seq + i) % self->max_send] =
            j->first + i == j->entry_count ? VB_WR_RDMA_WRITE_WITH_IMM : VB_WR_RDMA_WRITE;
    self->posted += j->count;
    self->batches[(self->batch_first + self->batch_count++) % self->max_send] =
        (batch){self->posted, ns_now(), (region_object *)Py_NewRef((PyObject *)region)};
    region->in_flight++;
}

static void unbook(qp_object *self, const job *j, region_object *region, uint64_t rejected)
{
    uint32_t newest = (self->batch_first + self->batch_count - 1) % self->max_send;
    self->posted -= rejected;
    if (rejected == j->count) { /* the ring of batches has room for what is in flight, not for refused calls */
        self->batch_count--;
        region->in_flight--;
        Py_DECREF((PyObject *)region);
        return;
    }
    self->batches[newest].last -= rejected;
    qp_release_batches(self, self->retired);
}

static PyObject *run(qp_object *self, const job *j, region_object *region)
{
    int error = 0;
    uint64_t accepted;
    if (!j->count)
        return PyLong_FromLong(0);
    book(self, j, region);
    self->busy++;
    if (j->count >= RELEASE_GIL_FROM) {
        Py_BEGIN_ALLOW_THREADS
        accepted = post(self, j, &error);
        Py_END_ALLOW_THREADS
    } else {
        accepted = post(self, j, &error);
    }
    self->busy--;
    if (accepted < j->count)
        unbook(self, j, region, j->count - accepted);
    /* A full queue is no error while something is in flight that will make room. */
    if (accepted || (error == ENOMEM && self->posted != self->retired))
        return PyLong_FromUnsignedLongLong(accepted);
    const char *peer = PyUnicode_AsUTF8AndSize(self->peer, NULL);
    return fail(state_of(Py_TYPE((PyObject *)self)), error, "posting %llu writes on queue pair 0x%06x to %s",
                (unsigned long long)j->count, self->qp_num, peer ? peer : "?");
}

static int parse_imm(PyObject *value, job *j)
{
    if (value == Py_None)
        return 0;
    unsigned long imm = PyLong_AsUnsignedLong(value);
    if (PyErr_Occurred())
        return -1;
    if (imm > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "immediate %lu has more than 32 bits", imm);
        return -1;
    }
    j->imm = (uint32_t)imm;
    return 1;
}

PyObject *qp_write(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"region", "entries",      "remote_address", "remote_bytes", "rkey",
                            "start",  "signal_every", "imm",            NULL};
    qp_object *self = SELF(object);
    module_state *state = state_of(Py_TYPE((PyObject *)self));
    PyObject *region, *imm = Py_None, *result = NULL;
    Py_buffer entries;
    unsigned long long remote_bytes;
    Py_ssize_t start = 0;
    job j = {.signal_every = 16};
    unsigned long long remote;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!y*KKI|$nIO:write", names, state->region, &region, &entries,
                                     &remote, &remote_bytes, &j.rkey, &start, &j.signal_every, &imm))
        return NULL;
    region_object *source = (region_object *)region;
    int with_imm = parse_imm(imm, &j);
    if (with_imm < 0 || !still_open(state, self->qp, "queue pair") ||
        !still_open(state, source->mr, "memory region") || check_idle(self, "the queue pair") < 0)
        goto done;
    j.entries = entries.buf;
    j.entry_count = (uint64_t)entries.len / (ENTRY_WORDS * sizeof(uint64_t));
    uint64_t total = j.entry_count + (uint64_t)with_imm, room = self->max_send - (self->posted - self->retired);
    uint32_t most = self->max_send / 2 ? self->max_send / 2 : 1;
    if (start < 0 || (uint64_t)start > total || source->owner != self->owner || !j.signal_every) {
        PyErr_Format(PyExc_ValueError, "start=%zd of %llu, signal_every=%u, region of %s context", start,
                     (unsigned long long)total, j.signal_every, source->owner == self->owner ? "this" : "another");
        goto done;
    }
    j.first = (uint64_t)start;
    if (check_entries(self, source, &entries, remote_bytes, j.first) < 0)
        goto done;
    j.signal_every = j.signal_every < most ? j.signal_every : most;
    j.local = source->iova;
    j.remote = remote;
    j.lkey = source->mr->lkey;
    j.count = total - j.first < room ? total - j.first : room;
    j.seq = self->posted + 1;
    result = run(self, &j, source);
done:
    PyBuffer_Release(&entries);
    return result;
}

PyObject *qp_receive(PyObject *object, PyObject *arg)
{
    qp_object *self = SELF(object);
    module_state *state = state_of(Py_TYPE((PyObject *)self));
    unsigned long wanted = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred() || !still_open(state, self->qp, "queue pair") || check_idle(self, "the queue pair") < 0)
        return NULL;
    uint64_t room = self->max_recv - (self->recv_posted - self->recv_retired), accepted = 0;
    uint64_t count = wanted < room ? wanted : room;
    while (accepted < count) {
        struct vb_recv_wr wrs[CHAIN], *bad = NULL;
        uint64_t n = count - accepted < CHAIN ? count - accepted : CHAIN;
        for (uint64_t i = 0; i < n; i++)
            wrs[i] = (struct vb_recv_wr){.wr_id = QP_RECEIVE | (self->recv_posted + 1 + i),
                                         .next = i + 1 < n ? &wrs[i + 1] : NULL};
        errno = 0;
        int rc = self->owner->context->ops.post_recv(self->qp, wrs, &bad);
        uint64_t taken = !rc ? n : bad ? (uint64_t)(bad - wrs) : 0;
        self->recv_posted += taken;
        accepted += taken;
        if (rc && !accepted)
            return fail(state, rc > 0 ? rc : errno, "posting %lu receives on queue pair 0x%06x", wanted, self->qp_num);
        if (rc)
            break;
    }
    return PyLong_FromUnsignedLongLong(accepted);
}
