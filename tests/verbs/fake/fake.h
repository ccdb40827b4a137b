/* A libibverbs for tests: two devices in one process, bytes really move, and every fault can be asked for.
 *
 * Work requests wait in their queue pair until `progress` executes them; each queue pair keeps its order, which of
 * them goes next is random. Tests reach `fake_knobs`, `fake_counts` and the fake_ functions by ctypes. */
#ifndef FAKE_H
#define FAKE_H

#include "ibv_abi.h"

enum { DEVICES = 2, MAX_DEPTH = 4096, ANY = 0 };

struct vb_device {
    const char *name;
};

/* All zero: no fault. Chances are in 1/65536. */
struct fake_knobs {
    uint64_t seed;
    uint32_t hold;             /* nothing is executed */
    uint32_t chance_delay;     /* a step of progress does nothing */
    uint32_t chance_duplicate; /* a completion is delivered twice */
    uint32_t chance_partial;   /* a post accepts only some of its chain and answers partial_errno */
    uint32_t partial_errno;
    uint32_t short_poll;   /* a poll returns at most so many; 0: as asked */
    uint32_t fail_status;  /* the work request fail_at (counted from 1 over all queue pairs) ends with this status */
    uint64_t fail_at;
    uint64_t register_limit; /* bytes that can be registered in all; 0: no limit */
    uint32_t modify_errno;   /* moving a queue pair to modify_state fails */
    uint32_t modify_state;
    uint32_t refuse_inline; /* queue pairs with inline data can't be made */
    uint32_t lossy_reset;   /* a move to ERR flushes nothing, as hardware that is gone */
    uint32_t create_errno;  /* completion queues can't be made */
    uint32_t chance_late;   /* a completion is not delivered yet although its work is done */
    uint32_t chance_rnr;    /* an immediate finds its receiver not ready for the moment */
    uint32_t chance_event;  /* a step of progress raises an asynchronous event */
    uint32_t gone;          /* the device is dead: every call on it fails, nothing completes */
    uint32_t refuse_relaxed; /* registration with relaxed ordering fails */
    uint32_t dmabuf_errno;  /* registration of a dmabuf fails */
    uint32_t without_ece;
    uint32_t port_state; /* 0: ACTIVE */
    uint64_t max_mr_bytes; /* 0: 4 GiB */
    uint64_t register_fail_at; /* that registration (counted from 1) fails */
};

struct fake_counts {
    int64_t contexts, pds, mrs, cqs, channels, qps;
    uint64_t registered_bytes, executed, posts, overruns, unacked, registrations, events;
    uint64_t arms, asks; /* of completion queues; for asynchronous events */
};

struct cq {
    struct vb_cq base;
    struct vb_wc *wcs; /* a ring of base.cqe */
    int first, held, armed, qps;
};

struct pending {
    struct vb_send_wr wr;
    struct vb_sge sge;
    uint8_t inlined[256];
};

struct qp {
    struct vb_qp base;
    struct qp *next;
    struct pending *sends; /* a ring of max_send */
    uint64_t *receives;    /* a ring of max_recv */
    uint32_t max_send, max_recv, first_send, send_count, first_receive, receive_count;
    uint32_t unpolled; /* work requests executed since the last signalled one: their room is not free yet */
    uint32_t remote;
    struct vb_wc *late; /* a ring of late_room completions that are not in their queue yet */
    uint32_t late_room, first_late, late_count;
    struct vb_qp_attr attr; /* as it was connected */
    struct vb_ece ece;
    int rnr_retry, rnr_tries, sq_sig_all, dead;
};

struct mr {
    struct vb_mr base;
    struct mr *next;
    int access;
    uint64_t iova;
    uint8_t *mapped; /* pages of a dmabuf, or NULL */
};

extern struct fake_knobs fake_knobs;
extern struct fake_counts fake_counts;
extern pthread_mutex_t fake_lock;
extern struct qp *fake_qps;
extern struct mr *fake_mrs;

#define LOCKED(statement)                                                                                             \
    do {                                                                                                              \
        pthread_mutex_lock(&fake_lock);                                                                               \
        statement;                                                                                                    \
        pthread_mutex_unlock(&fake_lock);                                                                             \
    } while (0)

/* wire.c, all with fake_lock held */
void fake_progress(void);
void fake_flush(struct qp *qp);
int fake_raise(struct vb_context *context, int type, uint32_t object);
int fake_poll(struct vb_cq *cq, int count, struct vb_wc *wc);
int fake_arm(struct vb_cq *cq, int solicited_only);
int fake_post_send(struct vb_qp *qp, struct vb_send_wr *wr, struct vb_send_wr **bad);
int fake_post_recv(struct vb_qp *qp, struct vb_recv_wr *wr, struct vb_recv_wr **bad);

#endif
