/* Private header of jaxrl_sync.transfer._verbs: one object per resource, each with a parent that it keeps alive.
 *
 * A call that releases the GIL marks the objects it uses as busy; close() refuses a busy object with BufferError.
 * Bookkeeping is done with the GIL held, so polling and posting may happen in different threads. */
#ifndef JAXRL_SYNC_VERBS_H
#define JAXRL_SYNC_VERBS_H

#define Py_LIMITED_API 0x030B0000
#include <Python.h> /* no '#' in formats: an abi3 build with the headers of Python 3.13 breaks it in 3.11 and 3.12 */
#include <structmember.h>

/* Headers from 3.12 on count no reference to None here: in 3.11, where it isn't immortal, it was freed in the end. */
#undef Py_RETURN_NONE
#define Py_RETURN_NONE return Py_NewRef(Py_None)

#include <stdint.h>

#include "ibv_dl.h"

typedef struct {
    PyObject *error;    /* jaxrl_sync.transfer.verbs.errors.VerbsError */
    PyObject *weak_set; /* weakref.WeakSet */
    PyTypeObject *context, *region, *cq, *qp;
    uint64_t next_token;
} module_state;

/* What every object starts with. */
#define OBJECT_HEAD                                                                                                   \
    PyObject ob_base;                                                                                                 \
    PyObject *weak_refs;                                                                                              \
    int busy;

typedef struct {
    OBJECT_HEAD
} object_head;

typedef struct {
    OBJECT_HEAD
    const struct vb_library *lib;
    struct vb_context *context; /* NULL when closed, as everywhere below */
    struct vb_pd *pd;
    PyObject *name;
    PyObject *children; /* WeakSet of regions, queues and queue pairs */
    struct vb_device_attr limits;
    uint64_t registrations, registered_bytes, registration_ns; /* in all, closed ones too */
} context_object;

typedef struct {
    OBJECT_HEAD
    context_object *owner;
    struct vb_mr *mr;
    Py_buffer buffer; /* obj is NULL for dmabuf */
    uint64_t iova;
    char relaxed;
    int64_t in_flight; /* batches of work requests that read it */
} region_object;

/* One completion as Python sees it; transfer/verbs/records.py has the same layout. */
typedef struct {
    uint64_t token, seq;
    uint32_t qp_num, status, opcode, byte_len, imm, vendor_err;
    uint32_t retires; /* work requests that this completion accounts for, itself included */
    uint32_t receive;
} record;

struct qp_object;

typedef struct {
    OBJECT_HEAD
    context_object *owner;
    struct vb_cq *cq;
    struct vb_comp_channel *channel;
    int64_t depth, reserved; /* entries, and those that attached queue pairs may need at worst */
    struct qp_object **qps;  /* borrowed; a queue pair removes itself */
    size_t qp_count, qp_room;
    record *backlog; /* taken from the device while waiting or draining, not yet seen by Python */
    size_t first, held, backlog_room;
    uint64_t polled, strays, errors, by_status[VB_WC_STATUS_COUNT];
} cq_object;

typedef struct {
    uint64_t last;      /* sequence number of its last work request */
    uint64_t posted_ns; /* when it was posted */
    region_object *region;
} batch;

enum { HISTOGRAM = 40 }; /* entry i counts what took 2^i to 2^(i+1) ns; the last also what took longer */

enum { CHAIN = 64 };

typedef struct qp_object {
    OBJECT_HEAD
    context_object *owner;
    cq_object *cq;
    struct vb_qp *qp;
    PyObject *peer;
    uint64_t token;
    uint32_t qp_num, max_send, max_recv, max_inline, max_message;
    uint64_t posted, retired, recv_posted, recv_retired; /* sequence numbers; the difference is in flight */
    uint8_t *opcodes;                                    /* of the work requests in flight, by seq % max_send */
    batch *batches;                                      /* a ring of max_send */
    uint32_t batch_first, batch_count;
    uint64_t failed, flushed, lost, post_calls;
    uint64_t post_ns[HISTOGRAM], done_ns[HISTOGRAM]; /* of doorbells; of batches from post to completion */
    struct vb_send_wr wrs[CHAIN];
    struct vb_sge sges[CHAIN];
} qp_object;

/* module.c */
extern struct PyModuleDef verbs_module;
module_state *state_of(PyTypeObject *type);
const struct vb_library *library_or_fail(module_state *state);
/* Sets VerbsError(errnum, "<formatted>: <errno text>"); returns NULL. */
PyObject *fail(module_state *state, int errnum, const char *format, ...);
int still_open(module_state *state, const void *resource, const char *what);
/* BufferError if a call in another thread uses the object. */
int check_idle(const void *object, const char *what);
PyObject *enter(PyObject *self, PyObject *unused);
PyObject *leave(PyObject *self, PyObject *args);
/* From a deallocator, which can neither raise nor hand out the object. */
void warn_unclosed(const char *what, PyObject *device);
double seconds_now(void);
uint64_t ns_now(void);
void free_object(PyObject *self);

/* context.c */
int context_adopt(context_object *self, PyObject *child);
extern PyType_Spec context_spec;

/* region.c */
extern PyType_Spec region_spec;

/* cq.c */
extern PyType_Spec cq_spec;
int cq_attach(cq_object *self, qp_object *qp);
void cq_detach(cq_object *self, qp_object *qp);
/* Moves what the device has into the backlog. Returns how many were there, -1 with an exception. */
int cq_collect(cq_object *self, qp_object *closing);

/* qp.c */
extern PyType_Spec qp_spec;
#define QP_RECEIVE (UINT64_C(1) << 63) /* marks the wr_id of a receive */
void qp_count_ns(uint64_t *histogram, uint64_t ns);
/* Lets go of the memory of batches that end at or before the sequence number. */
void qp_release_batches(qp_object *self, uint64_t up_to);
/* Books a completion; 1 if Python must see it, 0 if it was seen before. */
int qp_account(qp_object *self, const struct vb_wc *wc, record *out);

/* state.c */
int qp_to_state(qp_object *self, module_state *state, int target);
PyObject *qp_to_init(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *qp_to_rtr(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *qp_to_rts(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *qp_to_error(PyObject *object, PyObject *unused);
PyObject *qp_query(PyObject *object, PyObject *unused);
PyObject *qp_query_ece(PyObject *object, PyObject *unused);
PyObject *qp_set_ece(PyObject *object, PyObject *args);

/* post.c */
PyObject *qp_write(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *qp_receive(PyObject *object, PyObject *arg);

#endif
