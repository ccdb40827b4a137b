/* Compiles only where cext/verbs/ibv_abi.h agrees with the installed <infiniband/verbs.h>. */
#include <infiniband/verbs.h>

#include "ibv_abi.h"

#define SAME(ours, theirs, field)                                                                                     \
    _Static_assert(offsetof(struct ours, field) == offsetof(struct theirs, field), #ours "." #field)
#define SIZE(ours, theirs) _Static_assert(sizeof(struct ours) == sizeof(struct theirs), #ours)
#define VALUE(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #ours)

SIZE(vb_device_attr, ibv_device_attr);
SAME(vb_device_attr, ibv_device_attr, max_mr_size);
SAME(vb_device_attr, ibv_device_attr, max_qp_wr);
SAME(vb_device_attr, ibv_device_attr, max_cqe);
SAME(vb_device_attr, ibv_device_attr, phys_port_cnt);
_Static_assert(sizeof(struct vb_port_attr) >= sizeof(struct ibv_port_attr), "vb_port_attr");
SAME(vb_port_attr, ibv_port_attr, active_mtu);
SAME(vb_port_attr, ibv_port_attr, max_msg_sz);
SAME(vb_port_attr, ibv_port_attr, lid);
SAME(vb_port_attr, ibv_port_attr, active_width);
SAME(vb_port_attr, ibv_port_attr, link_layer);
SAME(vb_port_attr, ibv_port_attr, flags);
SIZE(vb_pd, ibv_pd);
SIZE(vb_mr, ibv_mr);
SAME(vb_mr, ibv_mr, lkey);
SAME(vb_mr, ibv_mr, rkey);
SIZE(vb_comp_channel, ibv_comp_channel);
SAME(vb_comp_channel, ibv_comp_channel, fd);
SIZE(vb_cq, ibv_cq);
SAME(vb_cq, ibv_cq, cqe);
SIZE(vb_qp, ibv_qp);
SAME(vb_qp, ibv_qp, qp_num);
SAME(vb_qp, ibv_qp, state);
SIZE(vb_qp_init_attr, ibv_qp_init_attr);
SAME(vb_qp_init_attr, ibv_qp_init_attr, cap);
SAME(vb_qp_init_attr, ibv_qp_init_attr, sq_sig_all);
SIZE(vb_ah_attr, ibv_ah_attr);
SAME(vb_ah_attr, ibv_ah_attr, is_global);
SAME(vb_ah_attr, ibv_ah_attr, port_num);
_Static_assert(sizeof(struct vb_global_route) == sizeof(struct ibv_global_route), "vb_global_route");
SIZE(vb_qp_attr, ibv_qp_attr);
SAME(vb_qp_attr, ibv_qp_attr, ah_attr);
SAME(vb_qp_attr, ibv_qp_attr, pkey_index);
SAME(vb_qp_attr, ibv_qp_attr, max_dest_rd_atomic);
SAME(vb_qp_attr, ibv_qp_attr, min_rnr_timer);
SAME(vb_qp_attr, ibv_qp_attr, timeout);
SAME(vb_qp_attr, ibv_qp_attr, rnr_retry);
SIZE(vb_sge, ibv_sge);
SIZE(vb_send_wr, ibv_send_wr);
SAME(vb_send_wr, ibv_send_wr, send_flags);
SAME(vb_send_wr, ibv_send_wr, imm_data);
SAME(vb_send_wr, ibv_send_wr, wr.rdma.remote_addr);
SAME(vb_send_wr, ibv_send_wr, wr.rdma.rkey);
SIZE(vb_recv_wr, ibv_recv_wr);
SIZE(vb_wc, ibv_wc);
SAME(vb_wc, ibv_wc, imm_data);
SAME(vb_wc, ibv_wc, qp_num);
SAME(vb_wc, ibv_wc, wc_flags);
SIZE(vb_async_event, ibv_async_event);
SAME(vb_async_event, ibv_async_event, event_type);
SIZE(vb_context_ops, ibv_context_ops);
SAME(vb_context_ops, ibv_context_ops, poll_cq);
SAME(vb_context_ops, ibv_context_ops, req_notify_cq);
SAME(vb_context_ops, ibv_context_ops, post_send);
SAME(vb_context_ops, ibv_context_ops, post_recv);
SIZE(vb_context, ibv_context);
SAME(vb_context, ibv_context, async_fd);
SAME(vb_context, ibv_context, num_comp_vectors);
SIZE(vb_ece, ibv_ece);
SAME(vb_ece, ibv_ece, comp_mask);
SAME(vb_qp_attr, ibv_qp_attr, port_num);
VALUE(VB_QPS_ERR, IBV_QPS_ERR);
VALUE(VB_QPT_RC, IBV_QPT_RC);
VALUE(VB_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM);
VALUE(VB_WC_RECV_RDMA_WITH_IMM, IBV_WC_RECV_RDMA_WITH_IMM);
VALUE(VB_WC_WR_FLUSH_ERR, IBV_WC_WR_FLUSH_ERR);
VALUE(VB_WC_STATUS_COUNT, IBV_WC_TM_RNDV_INCOMPLETE + 1);
VALUE(VB_WC_WITH_IMM, IBV_WC_WITH_IMM);
VALUE(VB_SEND_SIGNALED, IBV_SEND_SIGNALED);
VALUE(VB_SEND_INLINE, IBV_SEND_INLINE);
VALUE(VB_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_READ);
VALUE(VB_ACCESS_RELAXED_ORDERING, IBV_ACCESS_RELAXED_ORDERING);
VALUE(VB_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ACTIVE);
VALUE(VB_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
VALUE(VB_EVENT_DEVICE_FATAL, IBV_EVENT_DEVICE_FATAL);
VALUE(VB_EVENT_PORT_ERR, IBV_EVENT_PORT_ERR);
VALUE(VB_EVENT_GID_CHANGE, IBV_EVENT_GID_CHANGE);
VALUE(VB_WC_GENERAL_ERR, IBV_WC_GENERAL_ERR);
VALUE(VB_QP_CAP, IBV_QP_CAP);
VALUE(VB_QP_PKEY_INDEX, IBV_QP_PKEY_INDEX);
VALUE(VB_QP_AV, IBV_QP_AV);
VALUE(VB_QP_PATH_MTU, IBV_QP_PATH_MTU);
VALUE(VB_QP_TIMEOUT, IBV_QP_TIMEOUT);
VALUE(VB_QP_RETRY_CNT, IBV_QP_RETRY_CNT);
VALUE(VB_QP_RNR_RETRY, IBV_QP_RNR_RETRY);
VALUE(VB_QP_RQ_PSN, IBV_QP_RQ_PSN);
VALUE(VB_QP_MAX_QP_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC);
VALUE(VB_QP_MIN_RNR_TIMER, IBV_QP_MIN_RNR_TIMER);
VALUE(VB_QP_SQ_PSN, IBV_QP_SQ_PSN);
VALUE(VB_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_DEST_RD_ATOMIC);
VALUE(VB_QP_DEST_QPN, IBV_QP_DEST_QPN);
