/* The control path of the fake: completion channels and queues, queue pairs and their states. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static uint32_t next_number = 0x11;

struct vb_comp_channel *ibv_create_comp_channel(struct vb_context *context)
{
    int fds[2];
    struct vb_comp_channel *channel = calloc(1, sizeof *channel);
    if (pipe2(fds, O_CLOEXEC)) {
        free(channel);
        return NULL;
    }
    *channel = (struct vb_comp_channel){context, fds[0], fds[1]}; /* refcnt serves as the writing end */
    LOCKED(fake_counts.channels++);
    return channel;
}

int ibv_destroy_comp_channel(struct vb_comp_channel *channel)
{
    close(channel->fd);
    close(channel->refcnt);
    free(channel);
    LOCKED(fake_counts.channels--);
    return 0;
}

struct vb_cq *ibv_create_cq(struct vb_context *context, int cqe, void *user, struct vb_comp_channel *channel, int vector)
{
    (void)vector;
    if (fake_knobs.create_errno) {
        errno = (int)fake_knobs.create_errno;
        return NULL;
    }
    struct cq *cq = calloc(1, sizeof *cq);
    cq->base = (struct vb_cq){.context = context, .channel = channel, .cq_context = user, .cqe = cqe};
    cq->wcs = calloc((size_t)cqe, sizeof *cq->wcs);
    LOCKED(fake_counts.cqs++);
    return &cq->base;
}

int ibv_destroy_cq(struct vb_cq *target)
{
    struct cq *cq = (struct cq *)target;
    if (cq->qps)
        return EBUSY;
    free(cq->wcs);
    free(cq);
    LOCKED(fake_counts.cqs--);
    return 0;
}

int ibv_get_cq_event(struct vb_comp_channel *channel, struct vb_cq **cq, void **user)
{
    if (read(channel->fd, cq, sizeof *cq) != sizeof *cq)
        return -1;
    *user = (*cq)->cq_context;
    LOCKED(fake_counts.unacked++);
    return 0;
}

void ibv_ack_cq_events(struct vb_cq *cq, unsigned int count)
{
    (void)cq;
    LOCKED(fake_counts.unacked -= count);
}

struct vb_qp *ibv_create_qp(struct vb_pd *pd, struct vb_qp_init_attr *attr)
{
    if (fake_knobs.refuse_inline && attr->cap.max_inline_data) {
        errno = EINVAL;
        return NULL;
    }
    struct qp *qp = calloc(1, sizeof *qp);
    qp->base.context = pd->context;
    qp->base.pd = pd;
    qp->base.send_cq = attr->send_cq;
    qp->base.recv_cq = attr->recv_cq;
    qp->max_send = attr->cap.max_send_wr;
    qp->max_recv = attr->cap.max_recv_wr ? attr->cap.max_recv_wr : 1;
    qp->sends = calloc(qp->max_send, sizeof *qp->sends);
    qp->receives = calloc(qp->max_recv, sizeof *qp->receives);
    qp->late_room = 2 * (qp->max_send + qp->max_recv);
    qp->late = calloc(qp->late_room, sizeof *qp->late);
    qp->ece = (struct vb_ece){0x15b3, 7, 0};
    attr->cap.max_inline_data = attr->cap.max_inline_data > 256 ? 256 : attr->cap.max_inline_data;
    pthread_mutex_lock(&fake_lock);
    qp->base.qp_num = next_number++;
    qp->next = fake_qps;
    fake_qps = qp;
    fake_counts.qps++;
    ((struct cq *)attr->send_cq)->qps++;
    pthread_mutex_unlock(&fake_lock);
    return &qp->base;
}

int ibv_modify_qp(struct vb_qp *target, struct vb_qp_attr *attr, int mask)
{
    static const int from[] = {-1, VB_QPS_RESET, VB_QPS_INIT, VB_QPS_RTR};
    struct qp *qp = (struct qp *)target;
    int rc = 0, state = attr->qp_state;
    pthread_mutex_lock(&fake_lock);
    if (fake_knobs.gone)
        rc = EIO;
    else if (fake_knobs.modify_errno && (int)fake_knobs.modify_state == state)
        rc = (int)fake_knobs.modify_errno;
    else if (state >= VB_QPS_INIT && state <= VB_QPS_RTS && target->state != from[state])
        rc = EINVAL;
    else if (state == VB_QPS_RTR && (!(mask & VB_QP_AV) || attr->path_mtu < 1 || attr->path_mtu > 5))
        rc = EINVAL;
    else if (state == VB_QPS_ERR)
        fake_flush(qp);
    else if (state == VB_QPS_RESET)
        qp->send_count = qp->receive_count = qp->unpolled = qp->late_count = 0;
    if (!rc) {
        qp->attr.port_num = mask & VB_QP_PORT ? attr->port_num : qp->attr.port_num;
        qp->attr.pkey_index = mask & VB_QP_PKEY_INDEX ? attr->pkey_index : qp->attr.pkey_index;
        qp->attr.path_mtu = mask & VB_QP_PATH_MTU ? attr->path_mtu : qp->attr.path_mtu;
        qp->attr.ah_attr = mask & VB_QP_AV ? attr->ah_attr : qp->attr.ah_attr;
        qp->attr.timeout = mask & VB_QP_TIMEOUT ? attr->timeout : qp->attr.timeout;
        qp->attr.retry_cnt = mask & VB_QP_RETRY_CNT ? attr->retry_cnt : qp->attr.retry_cnt;
        target->state = state;
        qp->remote = mask & VB_QP_DEST_QPN ? attr->dest_qp_num : qp->remote;
        qp->rnr_retry = mask & VB_QP_RNR_RETRY ? attr->rnr_retry : qp->rnr_retry;
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

int ibv_destroy_qp(struct vb_qp *target)
{
    struct qp *qp = (struct qp *)target;
    pthread_mutex_lock(&fake_lock);
    for (struct qp **at = &fake_qps; *at; at = &(*at)->next)
        if (*at == qp) {
            *at = qp->next;
            fake_counts.qps--;
            break;
        }
    ((struct cq *)target->send_cq)->qps--;
    pthread_mutex_unlock(&fake_lock);
    free(qp->sends);
    free(qp->receives);
    free(qp->late);
    free(qp);
    return 0;
}

int ibv_query_qp(struct vb_qp *target, struct vb_qp_attr *attr, int mask, struct vb_qp_init_attr *init)
{
    struct qp *qp = (struct qp *)target;
    (void)mask;
    if (fake_knobs.gone)
        return EIO;
    *attr = qp->attr;
    attr->qp_state = target->state;
    attr->dest_qp_num = qp->remote;
    attr->rnr_retry = (uint8_t)qp->rnr_retry;
    init->cap = (struct vb_qp_cap){qp->max_send, qp->max_recv, 1, 1, fake_knobs.refuse_inline ? 0 : 256};
    return 0;
}

int ibv_query_ece(struct vb_qp *target, struct vb_ece *ece)
{
    if (fake_knobs.without_ece)
        return EOPNOTSUPP;
    *ece = ((struct qp *)target)->ece;
    return 0;
}

/* As hardware does: what both know remains; another vendor's options are refused. */
int ibv_set_ece(struct vb_qp *target, struct vb_ece *ece)
{
    struct qp *qp = (struct qp *)target;
    if (fake_knobs.without_ece)
        return EOPNOTSUPP;
    if (ece->vendor_id != qp->ece.vendor_id)
        return EINVAL;
    qp->ece.options &= ece->options;
    *ece = qp->ece;
    return 0;
}
