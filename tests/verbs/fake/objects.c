/* The control path of the fake: devices, async events, memory; queues are in queues.c. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define DMABUF_PAGE 4096

struct fake_knobs fake_knobs;
struct fake_counts fake_counts;
pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
struct qp *fake_qps;
struct mr *fake_mrs;

static struct vb_device devices[DEVICES] = {{"fake0"}, {"fake1"}};
static uint32_t next_key = 0x1000;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Hardware goes on while everybody sleeps. */
static void *tick(void *unused)
{
    (void)unused;
    for (;;) {
        usleep(500);
        pthread_mutex_lock(&fake_lock);
        fake_progress();
        pthread_mutex_unlock(&fake_lock);
    }
    return NULL;
}

static void start(void)
{
    pthread_t thread;
    if (!pthread_create(&thread, NULL, tick, NULL))
        pthread_detach(thread);
}

struct vb_device **ibv_get_device_list(int *count)
{
    struct vb_device **list = calloc(DEVICES + 1, sizeof *list);
    for (int i = 0; i < DEVICES; i++)
        list[i] = &devices[i];
    *count = DEVICES;
    return list;
}

void ibv_free_device_list(struct vb_device **list)
{
    free(list);
}

const char *ibv_get_device_name(struct vb_device *device)
{
    return device->name;
}

struct context {
    struct vb_context base;
    int events; /* the writing end of async_fd */
};

struct vb_context *ibv_open_device(struct vb_device *device)
{
    int fds[2];
    struct context *context = calloc(1, sizeof *context);
    if (pipe2(fds, O_CLOEXEC)) {
        free(context);
        return NULL;
    }
    pthread_once(&once, start);
    context->base.device = device;
    context->base.async_fd = fds[0];
    context->events = fds[1];
    context->base.ops.poll_cq = fake_poll;
    context->base.ops.req_notify_cq = fake_arm;
    context->base.ops.post_send = fake_post_send;
    context->base.ops.post_recv = fake_post_recv;
    LOCKED(fake_counts.contexts++);
    return &context->base;
}

int ibv_close_device(struct vb_context *context)
{
    close(context->async_fd);
    close(((struct context *)context)->events);
    free(context);
    LOCKED(fake_counts.contexts--);
    return 0;
}

/* An event on a device (`object` is a queue pair number or a port). With fake_lock held. */
int fake_raise(struct vb_context *context, int type, uint32_t object)
{
    struct vb_async_event event = {.event_type = type};
    event.element.port_num = (int)object;
    for (struct qp *qp = fake_qps; qp; qp = qp->next)
        if (qp->base.qp_num == object)
            event.element.qp = &qp->base;
    fake_counts.events++;
    return write(((struct context *)context)->events, &event, sizeof event) == sizeof event ? 0 : -1;
}

/* For tests: the event above on the device of a queue pair. */
int fake_async_of(uint32_t qp_num, int type, uint32_t object)
{
    int rc = -1;
    LOCKED(for (struct qp *qp = fake_qps; qp; qp = qp->next) if (qp->base.qp_num == qp_num) rc =
               fake_raise(qp->base.context, type, object));
    return rc;
}

/* For tests: other faults, from one moment to the next. `keep` leaves the counts of what was done as they are. */
void fake_set(const struct fake_knobs *knobs, int keep)
{
    LOCKED(fake_knobs = *knobs; if (!keep) fake_counts.executed = fake_counts.registrations = fake_counts.events = 0);
}

/* For tests: the process behind a queue pair is gone. */
int fake_kill(uint32_t qp_num)
{
    int found = 0;
    LOCKED(for (struct qp *qp = fake_qps; qp; qp = qp->next) if (qp->base.qp_num == qp_num) found = qp->dead = 1);
    return found ? 0 : -1;
}

int ibv_get_async_event(struct vb_context *context, struct vb_async_event *event)
{
    LOCKED(fake_counts.asks++);
    if (read(context->async_fd, event, sizeof *event) != sizeof *event)
        return -1;
    LOCKED(fake_counts.unacked++);
    return 0;
}

void ibv_ack_async_event(struct vb_async_event *event)
{
    (void)event;
    LOCKED(fake_counts.unacked--);
}

int ibv_query_device(struct vb_context *context, struct vb_device_attr *attr)
{
    (void)context;
    *attr = (struct vb_device_attr){.fw_ver = "fake-1",
                                    .max_mr_size = fake_knobs.max_mr_bytes ? fake_knobs.max_mr_bytes : UINT64_C(1) << 32,
                                    .max_qp = 64,
                                    .max_qp_wr = MAX_DEPTH,
                                    .max_sge = 1,
                                    .max_cq = 64,
                                    .max_cqe = 4 * MAX_DEPTH,
                                    .max_mr = 64,
                                    .phys_port_cnt = 1};
    return 0;
}

int ibv_query_port(struct vb_context *context, uint8_t port, struct vb_port_attr *attr)
{
    (void)context;
    if (port != 1)
        return EINVAL;
    *attr = (struct vb_port_attr){.state = fake_knobs.port_state ? (int)fake_knobs.port_state : 4,
                                  .max_mtu = 5,
                                  .active_mtu = 3,
                                  .gid_tbl_len = 3,
                                  .max_msg_sz = 8 << 20,
                                  .pkey_tbl_len = 3,
                                  .active_width = 1,
                                  .active_speed = 1,
                                  .phys_state = 5,
                                  .link_layer = 2};
    return 0;
}

int ibv_query_gid(struct vb_context *context, uint8_t port, int index, union vb_gid *gid)
{
    static const uint8_t table[2][16] = {{0xfe, 0x80, [15] = 1}, {[10] = 0xff, 0xff, 10, 77, 0, 1}};
    if (port != 1 || index < 0 || index > 1) {
        errno = EINVAL;
        return -1;
    }
    memcpy(gid->raw, table[index], sizeof gid->raw);
    gid->raw[15] = (uint8_t)(1 + (context->device - devices));
    return 0;
}

int ibv_query_pkey(struct vb_context *context, uint8_t port, int index, uint16_t *pkey)
{
    static const uint8_t table[3][2] = {{0xff, 0xff}, {0, 0}, {0x80, 0x12}}; /* big endian */
    (void)context;
    if (port != 1 || index < 0 || index > 2) {
        errno = EINVAL;
        return -1;
    }
    memcpy(pkey, table[index], sizeof *pkey);
    return 0;
}

struct vb_pd *ibv_alloc_pd(struct vb_context *context)
{
    struct vb_pd *pd = calloc(1, sizeof *pd);
    pd->context = context;
    LOCKED(fake_counts.pds++);
    return pd;
}

int ibv_dealloc_pd(struct vb_pd *pd)
{
    int busy = 0;
    LOCKED(for (struct mr *mr = fake_mrs; mr; mr = mr->next) busy |= mr->base.pd == pd;
           for (struct qp *qp = fake_qps; qp; qp = qp->next) busy |= qp->base.pd == pd; fake_counts.pds -= !busy);
    if (busy)
        return EBUSY;
    free(pd);
    return 0;
}

static struct vb_mr *enlist(struct vb_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
    struct mr *mr = calloc(1, sizeof *mr);
    mr->base = (struct vb_mr){.context = pd->context, .pd = pd, .addr = addr, .length = length};
    mr->access = access;
    mr->iova = iova;
    pthread_mutex_lock(&fake_lock);
    int full = fake_knobs.register_limit && fake_counts.registered_bytes + length > fake_knobs.register_limit;
    full |= ++fake_counts.registrations == fake_knobs.register_fail_at;
    if (!full) {
        mr->base.lkey = mr->base.rkey = next_key;
        next_key += 0x101;
        mr->next = fake_mrs;
        fake_mrs = mr;
        fake_counts.mrs++;
        fake_counts.registered_bytes += length;
    }
    pthread_mutex_unlock(&fake_lock);
    if (!full)
        return &mr->base;
    free(mr);
    errno = ENOMEM;
    return NULL;
}

struct vb_mr *ibv_reg_mr(struct vb_pd *pd, void *addr, size_t length, int access)
{
    return enlist(pd, addr, length, (uint64_t)(uintptr_t)addr, access);
}

struct vb_mr *ibv_reg_mr_iova2(struct vb_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
    if (fake_knobs.refuse_relaxed && (access & VB_ACCESS_RELAXED_ORDERING)) {
        errno = EINVAL;
        return NULL;
    }
    return enlist(pd, addr, length, iova, (int)access);
}

/* The "dmabuf" is any file that can be mapped: what is written to the region can be read in the file. */
struct vb_mr *ibv_reg_dmabuf_mr(struct vb_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
    if (fake_knobs.dmabuf_errno || fcntl(fd, F_GETFD) < 0) {
        errno = fake_knobs.dmabuf_errno ? (int)fake_knobs.dmabuf_errno : EBADF;
        return NULL;
    }
    size_t before = offset % DMABUF_PAGE;
    uint8_t *pages = mmap(NULL, before + length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(offset - before));
    if (pages == MAP_FAILED)
        return NULL;
    struct vb_mr *made = enlist(pd, pages + before, length, iova, access);
    if (made)
        ((struct mr *)made)->mapped = pages;
    else
        munmap(pages, before + length);
    return made;
}

int ibv_dereg_mr(struct vb_mr *target)
{
    pthread_mutex_lock(&fake_lock);
    for (struct mr **at = &fake_mrs; *at; at = &(*at)->next)
        if (&(*at)->base == target) {
            *at = (*at)->next;
            fake_counts.mrs--;
            fake_counts.registered_bytes -= target->length;
            break;
        }
    pthread_mutex_unlock(&fake_lock);
    struct mr *mr = (struct mr *)target;
    if (mr->mapped)
        munmap(mr->mapped, (size_t)((uint8_t *)target->addr - mr->mapped) + target->length);
    free(mr);
    return 0;
}

int ibv_fork_init(void)
{
    return 0;
}

int ibv_is_fork_initialized(void)
{
    return 2;
}

const char *ibv_wc_status_str(int status)
{
    static const char *words[] = {"success", [4] = "local protection error", [5] = "Work Request Flushed Error",
                                  [10] = "remote access error", [12] = "transport retry counter exceeded",
                                  [13] = "RNR retry counter exceeded"};
    const char *word = status >= 0 && status <= 13 ? words[status] : NULL;
    return word ? word : "other error";
}

const char *ibv_event_type_str(int event)
{
    return event == 1 ? "local work queue catastrophic error" : event == 10 ? "port error" : "other event";
}
