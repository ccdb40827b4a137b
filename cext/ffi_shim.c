/* XLA's FFI face of the delta kernels: handlers that run inside of jit, on XLA's own buffers, without a copy.
 *
 * Built with the headers of the oldest supported jaxlib, because a newer runtime takes older handlers and not the
 * other way round; without headers the capsules are left out. Only names that newer headers keep are used. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "delta.h"

#ifdef JAXRL_FFI

#include <stdio.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

typedef XLA_FFI_CallFrame frame;

static XLA_FFI_Error *fail(const frame *f, const char *what, const char *why)
{
    char message[200];
    snprintf(message, sizeof message, "%s: %s", what, why);
    XLA_FFI_Error_Create_Args args = {
        .struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE,
        .message = message,
        .errc = XLA_FFI_Error_Code_INVALID_ARGUMENT,
    };
    return f->api->XLA_FFI_Error_Create(&args);
}

/* XLA asks every handler for the version that it was built against. */
static int answered_metadata(frame *f)
{
    if (!f->extension_start || f->extension_start->type != XLA_FFI_Extension_Metadata)
        return 0;
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)(void *)f->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return 1;
}

static int itemsize_of(XLA_FFI_DataType dtype)
{
    switch (dtype) {
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
        return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
        return 4;
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_F8E5M2:
    case XLA_FFI_DataType_F8E4M3:
    case XLA_FFI_DataType_F8E3M4:
    case XLA_FFI_DataType_F8E4M3FN:
    case XLA_FFI_DataType_F8E4M3B11FNUZ:
    case XLA_FFI_DataType_F8E5M2FNUZ:
    case XLA_FFI_DataType_F8E4M3FNUZ:
    case XLA_FFI_DataType_F8E8M0FNU:
        return 1;
    default:
        return 0;
    }
}

static const XLA_FFI_Buffer *arg(const frame *f, int i)
{
    return f->args.args[i];
}

static const XLA_FFI_Buffer *ret(const frame *f, int i)
{
    return f->rets.rets[i];
}

static int64_t elements_of(const XLA_FFI_Buffer *b)
{
    int64_t n = 1;
    for (int64_t d = 0; d < b->rank; d++)
        n *= b->dims[d];
    return n;
}

/* Missing attributes are 0: every handler's own Python wrapper gives all that it needs. */
static int64_t attribute(const frame *f, const char *name)
{
    for (int64_t i = 0; i < f->attrs.size; i++) {
        const XLA_FFI_ByteSpan *found = f->attrs.names[i];
        if (found->len != strlen(name) || memcmp(found->ptr, name, found->len) != 0 ||
            f->attrs.types[i] != XLA_FFI_AttrType_SCALAR)
            continue;
        const XLA_FFI_Scalar *scalar = f->attrs.attrs[i];
        if (scalar->dtype == XLA_FFI_DataType_S64)
            return *(const int64_t *)scalar->value;
    }
    return 0;
}

/* One buffer per leading index (vmap adds them): `batch` buffers of `stride` elements, of which the window
 * [offset, offset + elements) is compared or written. */
typedef struct {
    int64_t batch, stride, offset, elements;
    int itemsize, threads, kind;
} window;

static const char *read_window(const frame *f, const XLA_FFI_Buffer *buffer, int64_t batch, window *w)
{
    int64_t total = elements_of(buffer);
    *w = (window){.batch = batch, .stride = batch ? total / batch : 0};
    w->offset = attribute(f, "offset");
    w->elements = attribute(f, "elements");
    w->threads = (int)attribute(f, "threads");
    w->kind = (int)attribute(f, "kind");
    w->itemsize = itemsize_of(buffer->dtype);
    if (w->itemsize == 0)
        return "elements are not 1, 2 or 4 bytes wide";
    if (w->offset < 0 || w->elements < 0 || w->offset + w->elements > w->stride || w->elements > (int64_t)1 << 32)
        return "the window lies outside of the buffer";
    return w->kind < VALUES_OVERWRITE || w->kind > VALUES_ULP ? "unknown kind of values" : NULL;
}

static char *at(const XLA_FFI_Buffer *buffer, int64_t index, int64_t stride, int64_t offset, int itemsize)
{
    return (char *)buffer->data + (index * stride + offset) * itemsize;
}

static void fill_rest(uint32_t *positions, char *values, char *old, int64_t count, int64_t room, int itemsize)
{
    if (count >= room)
        return;
    memset(positions + count, 0xFF, (size_t)(room - count) * sizeof *positions);
    memset(values + count * itemsize, 0, (size_t)((room - count) * itemsize));
    if (old)
        memset(old + count * itemsize, 0, (size_t)((room - count) * itemsize));
}

/* (old, new) -> (count, positions, new bits[, old bits]); or (mask words, new) with attribute "mask". */
static XLA_FFI_Error *encode(frame *f)
{
    if (answered_metadata(f))
        return NULL;
    window w;
    int64_t batch = elements_of(ret(f, 0));
    const char *wrong = read_window(f, arg(f, 1), batch, &w);
    if (wrong)
        return fail(f, "delta encode", wrong);
    int mask = (int)attribute(f, "mask");
    int64_t room = batch ? elements_of(ret(f, 1)) / batch : 0, words = (w.elements + 31) / 32;
    if (mask ? elements_of(arg(f, 0)) != batch * words : elements_of(arg(f, 0)) != elements_of(arg(f, 1)))
        return fail(f, "delta encode", "the two buffers differ in size");
    for (int64_t i = 0; i < batch; i++) {
        const char *new = at(arg(f, 1), i, w.stride, w.offset, w.itemsize);
        uint32_t *positions = (uint32_t *)ret(f, 1)->data + i * room;
        char *values = at(ret(f, 2), i, room, 0, w.itemsize);
        char *old_out = f->rets.size > 3 ? at(ret(f, 3), i, room, 0, w.itemsize) : NULL;
        int64_t count =
            mask ? delta_mask((const uint32_t *)arg(f, 0)->data + i * words, new, w.elements, w.itemsize, positions,
                              values, room, w.threads)
                 : delta_compare(at(arg(f, 0), i, w.stride, w.offset, w.itemsize), new, w.elements, w.itemsize,
                                 positions, values, old_out, room, w.threads);
        if (count < 0)
            return fail(f, "delta encode", delta_refusal(count));
        ((uint32_t *)ret(f, 0)->data)[i] = (uint32_t)count;
        fill_rest(positions, values, old_out, count, room, w.itemsize);
    }
    return NULL;
}

/* (old, new) -> (sizes[3], u8 gaps, values, escapes): count, bytes of gaps, escapes; unused room is zero. */
static XLA_FFI_Error *encode_gaps(frame *f)
{
    if (answered_metadata(f))
        return NULL;
    window w;
    int64_t batch = elements_of(ret(f, 0)) / 3;
    const char *wrong = read_window(f, arg(f, 1), batch, &w);
    if (wrong || elements_of(arg(f, 0)) != elements_of(arg(f, 1)))
        return fail(f, "delta encode", wrong ? wrong : "the two buffers differ in size");
    int value_size = w.kind == VALUES_ULP ? 1 : w.itemsize;
    for (int64_t i = 0; i < batch; i++) {
        int64_t rooms[3], sizes[3];
        char *streams[3];
        for (int k = 0; k < 3; k++) {
            int size = k == 0 ? 1 : k == 1 ? value_size : w.itemsize;
            rooms[k] = elements_of(ret(f, k + 1)) / batch;
            streams[k] = at(ret(f, k + 1), i, rooms[k], 0, size);
        }
        fused_size found;
        int refused = delta_fused(at(arg(f, 0), i, w.stride, w.offset, w.itemsize),
                                  at(arg(f, 1), i, w.stride, w.offset, w.itemsize), w.elements, w.itemsize, w.kind,
                                  (uint8_t *)streams[0], rooms[0], streams[1], rooms[1], streams[2], rooms[2],
                                  w.threads, &found);
        if (refused)
            return fail(f, "delta encode", delta_refusal(refused));
        uint32_t *out = (uint32_t *)ret(f, 0)->data + 3 * i;
        out[0] = (uint32_t)found.count, out[1] = (uint32_t)found.gap_bytes, out[2] = (uint32_t)found.escapes;
        sizes[0] = found.gap_bytes, sizes[1] = found.count, sizes[2] = found.escapes;
        for (int k = 0; k < 3; k++) {
            int size = k == 0 ? 1 : k == 1 ? value_size : w.itemsize;
            if (sizes[k] < rooms[k])
                memset(streams[k] + sizes[k] * size, 0, (size_t)((rooms[k] - sizes[k]) * size));
        }
    }
    return NULL;
}

/* The result is the first argument's own memory where that was donated, else a copy of it. */
static char *result_of(const frame *f, const window *w)
{
    char *to = ret(f, 0)->data;
    if (to != arg(f, 0)->data)
        memcpy(to, arg(f, 0)->data, (size_t)(w->batch * w->stride * w->itemsize));
    return to;
}

/* (buffer, positions, values, count) -> buffer. */
static XLA_FFI_Error *apply(frame *f)
{
    if (answered_metadata(f))
        return NULL;
    window w;
    int64_t batch = elements_of(arg(f, 3)), room = batch ? elements_of(arg(f, 1)) / batch : 0;
    const char *wrong = read_window(f, arg(f, 0), batch, &w);
    if (wrong)
        return fail(f, "delta apply", wrong);
    char *to = result_of(f, &w);
    for (int64_t i = 0; i < batch; i++) {
        int64_t count = ((const uint32_t *)arg(f, 3)->data)[i];
        if (count > room)
            return fail(f, "delta apply", "the count is larger than the capacity: an overflowed delta is no delta");
        int64_t refused = delta_apply(to + (i * w.stride + w.offset) * w.itemsize, w.elements, w.itemsize,
                                      (const uint32_t *)arg(f, 1)->data + i * room, at(arg(f, 2), i, room, 0, w.itemsize),
                                      count, w.kind, NULL, w.threads);
        if (refused)
            return fail(f, "delta apply", delta_refusal(refused));
    }
    return NULL;
}

/* (buffer, u8 gaps, values, escapes, sizes[3]) -> buffer. */
static XLA_FFI_Error *apply_gaps(frame *f)
{
    if (answered_metadata(f))
        return NULL;
    window w;
    int64_t batch = elements_of(arg(f, 4)) / 3;
    const char *wrong = read_window(f, arg(f, 0), batch, &w);
    if (wrong)
        return fail(f, "delta apply", wrong);
    char *to = result_of(f, &w);
    int value_size = w.kind == VALUES_ULP ? 1 : w.itemsize;
    for (int64_t i = 0; i < batch; i++) {
        const uint32_t *sizes = (const uint32_t *)arg(f, 4)->data + 3 * i;
        int64_t rooms[3];
        for (int k = 0; k < 3; k++)
            rooms[k] = elements_of(arg(f, k + 1)) / batch;
        if (sizes[1] > rooms[0] || sizes[0] > rooms[1] || sizes[2] > rooms[2])
            return fail(f, "delta apply", "a size is larger than the capacity: an overflowed delta is no delta");
        int64_t refused = delta_apply_gaps(
            to + (i * w.stride + w.offset) * w.itemsize, w.elements, w.itemsize,
            (const uint8_t *)arg(f, 1)->data + i * rooms[0], sizes[1], at(arg(f, 2), i, rooms[1], 0, value_size),
            at(arg(f, 3), i, rooms[2], 0, w.itemsize), sizes[2], sizes[0], w.kind, w.threads);
        if (refused)
            return fail(f, "delta apply", delta_refusal(refused));
    }
    return NULL;
}

static const struct {
    const char *name;
    XLA_FFI_Error *(*handler)(frame *);
} handlers[] = {
    {"ffi_delta_encode", encode},
    {"ffi_delta_encode_gaps", encode_gaps},
    {"ffi_delta_apply", apply},
    {"ffi_delta_apply_gaps", apply_gaps},
};

int add_ffi_handlers(PyObject *module)
{
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++) {
        void *address;
        memcpy(&address, &handlers[i].handler, sizeof address);
        PyObject *capsule = PyCapsule_New(address, NULL, NULL);
        int failed = !capsule || PyModule_AddObjectRef(module, handlers[i].name, capsule) < 0;
        Py_XDECREF(capsule);
        if (failed)
            return -1;
    }
    return PyModule_AddIntConstant(module, "FFI_API_MINOR", XLA_FFI_API_MINOR);
}

#else

int add_ffi_handlers(PyObject *module)
{
    (void)module;
    return 0;
}

#endif
