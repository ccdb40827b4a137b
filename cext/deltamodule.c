/* The Python face of the delta kernels. Buffers are contiguous; everything is checked here or in the coder, so
 * that no argument reads or writes outside of a buffer. The GIL is released while a kernel works. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "delta.h"

#define MAX_ELEMENTS ((int64_t)1 << 32)

/* Buffers of one call, released together. */
typedef struct {
    Py_buffer views[6];
    int count;
} held;

static void release(held *h)
{
    while (h->count > 0)
        PyBuffer_Release(&h->views[--h->count]);
}

/* Takes `object` as whole, aligned elements of `itemsize` bytes; None is an empty buffer with data NULL. */
static int hold(held *h, PyObject *object, int itemsize, int writable, const char *name, void **data, int64_t *count)
{
    *data = NULL;
    *count = 0;
    if (object == Py_None)
        return 0;
    Py_buffer *view = &h->views[h->count];
    if (PyObject_GetBuffer(object, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return -1;
    h->count++;
    if (view->len % itemsize != 0 || (uintptr_t)view->buf % (uintptr_t)itemsize != 0) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes at %p are no whole, aligned elements of %d bytes", name,
                     view->len, view->buf, itemsize);
        return -1;
    }
    *data = view->buf;
    *count = view->len / itemsize;
    return 0;
}

static int check_itemsize(int itemsize)
{
    if (itemsize == 1 || itemsize == 2 || itemsize == 4)
        return 0;
    PyErr_Format(PyExc_ValueError, "itemsize is %d, expected 1, 2 or 4", itemsize);
    return -1;
}

static int check_kind(int kind)
{
    if (kind >= VALUES_OVERWRITE && kind <= VALUES_ULP)
        return 0;
    PyErr_Format(PyExc_ValueError, "kind is %d, expected 0 (overwrite), 1 (xor) or 2 (ulp)", kind);
    return -1;
}

static int check_equal(const char *name, int64_t found, int64_t expected)
{
    if (found == expected)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s has %lld elements, expected %lld", name, (long long)found,
                 (long long)expected);
    return -1;
}

static int check_elements(int64_t n)
{
    if (n >= 0 && n <= MAX_ELEMENTS)
        return 0;
    PyErr_Format(PyExc_ValueError, "%lld elements, expected at most 2^32", (long long)n);
    return -1;
}

static PyObject *answer(int64_t result)
{
    if (result < 0) {
        PyErr_SetString(result == REFUSED_MEMORY ? PyExc_MemoryError : PyExc_ValueError, delta_refusal(result));
        return NULL;
    }
    return PyLong_FromLongLong(result);
}

static PyObject *answer_none(int64_t result)
{
    if (result >= 0)
        return Py_NewRef(Py_None);
    return answer(result);
}

static PyObject *py_gaps_encode(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *positions, *out, *result = NULL;
    int width;
    held h = {.count = 0};
    void *p, *o;
    int64_t count, room, size;
    if (!PyArg_ParseTuple(args, "OiO:gaps_encode", &positions, &width, &out))
        return NULL;
    if (width != 1 && width != 2)
        return PyErr_Format(PyExc_ValueError, "width is %d, expected 1 or 2", width);
    if (hold(&h, positions, 4, 0, "positions", &p, &count) < 0 || hold(&h, out, width, 1, "out", &o, &room) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    size = width == 1 ? gaps_encode_u8(p, count, o, room) : gaps_encode_u16(p, count, o, room);
    Py_END_ALLOW_THREADS
    result = answer(size < 0 ? size : size * width);
done:
    release(&h);
    return result;
}

static PyObject *py_gaps_decode(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *data, *positions, *result = NULL;
    int width;
    long long elements;
    held h = {.count = 0};
    void *d, *p;
    int64_t size, count, refused;
    if (!PyArg_ParseTuple(args, "OiLO:gaps_decode", &data, &width, &elements, &positions))
        return NULL;
    if (width != 1 && width != 2)
        return PyErr_Format(PyExc_ValueError, "width is %d, expected 1 or 2", width);
    if (check_elements(elements) < 0 || hold(&h, data, width, 0, "data", &d, &size) < 0 ||
        hold(&h, positions, 4, 1, "positions", &p, &count) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    refused = width == 1 ? gaps_decode_u8(d, size, (uint64_t)elements, p, count)
                         : gaps_decode_u16(d, size, (uint64_t)elements, p, count);
    Py_END_ALLOW_THREADS
    result = answer_none(refused);
done:
    release(&h);
    return result;
}

static int check_parameter(int parameter)
{
    if (parameter >= 0 && parameter <= 30)
        return 0;
    PyErr_Format(PyExc_ValueError, "Rice parameter is %d, expected 0 to 30", parameter);
    return -1;
}

static PyObject *py_rice_encode(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *positions, *out, *result = NULL;
    int parameter;
    held h = {.count = 0};
    void *p, *o;
    int64_t count, room, size;
    if (!PyArg_ParseTuple(args, "OiO:rice_encode", &positions, &parameter, &out))
        return NULL;
    if (check_parameter(parameter) < 0 || hold(&h, positions, 4, 0, "positions", &p, &count) < 0 ||
        hold(&h, out, 1, 1, "out", &o, &room) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    size = rice_encode(p, count, parameter, o, room);
    Py_END_ALLOW_THREADS
    result = answer(size);
done:
    release(&h);
    return result;
}

static PyObject *py_rice_decode(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *data, *positions, *result = NULL;
    int parameter;
    long long elements;
    held h = {.count = 0};
    void *d, *p;
    int64_t size, count, refused;
    if (!PyArg_ParseTuple(args, "OiLO:rice_decode", &data, &parameter, &elements, &positions))
        return NULL;
    if (check_parameter(parameter) < 0 || check_elements(elements) < 0 ||
        hold(&h, data, 1, 0, "data", &d, &size) < 0 || hold(&h, positions, 4, 1, "positions", &p, &count) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    refused = rice_decode(d, size, parameter, (uint64_t)elements, p, count);
    Py_END_ALLOW_THREADS
    result = answer_none(refused);
done:
    release(&h);
    return result;
}

/* zigzag and unzigzag: (a, old, itemsize, out), all of the same length. */
static PyObject *run_zigzag(PyObject *args, void kernel(const void *, const void *, int64_t, int, void *))
{
    PyObject *first, *old, *out, *result = NULL;
    int itemsize;
    held h = {.count = 0};
    void *f, *b, *o;
    int64_t count, old_count, room;
    if (!PyArg_ParseTuple(args, "OOiO", &first, &old, &itemsize, &out) || check_itemsize(itemsize) < 0)
        return NULL;
    if (hold(&h, first, itemsize, 0, "values", &f, &count) < 0 || hold(&h, old, itemsize, 0, "old", &b, &old_count) < 0 ||
        hold(&h, out, itemsize, 1, "out", &o, &room) < 0 || check_equal("old", old_count, count) < 0 ||
        check_equal("out", room, count) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    kernel(f, b, count, itemsize, o);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    release(&h);
    return result;
}

static PyObject *py_zigzag(PyObject *module, PyObject *args)
{
    (void)module;
    return run_zigzag(args, zigzag_encode);
}

static PyObject *py_unzigzag(PyObject *module, PyObject *args)
{
    (void)module;
    return run_zigzag(args, zigzag_decode);
}

static PyObject *py_ulp_encode(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *new, *old, *codes, *escapes, *result = NULL;
    int itemsize;
    held h = {.count = 0};
    void *n, *b, *c, *e;
    int64_t count, old_count, code_count, room, found;
    if (!PyArg_ParseTuple(args, "OOiOO:ulp_encode", &new, &old, &itemsize, &codes, &escapes) ||
        check_itemsize(itemsize) < 0)
        return NULL;
    if (hold(&h, new, itemsize, 0, "new", &n, &count) < 0 || hold(&h, old, itemsize, 0, "old", &b, &old_count) < 0 ||
        hold(&h, codes, 1, 1, "codes", &c, &code_count) < 0 ||
        hold(&h, escapes, itemsize, 1, "escapes", &e, &room) < 0 || check_equal("old", old_count, count) < 0 ||
        check_equal("codes", code_count, count) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    found = ulp_encode(n, b, count, itemsize, c, e, room);
    Py_END_ALLOW_THREADS
    result = answer(found);
done:
    release(&h);
    return result;
}

static PyObject *py_ulp_decode(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *codes, *escapes, *old, *new, *result = NULL;
    int itemsize;
    held h = {.count = 0};
    void *c, *e, *b, *n;
    int64_t count, escape_count, old_count, room, refused;
    if (!PyArg_ParseTuple(args, "OOOiO:ulp_decode", &codes, &escapes, &old, &itemsize, &new) ||
        check_itemsize(itemsize) < 0)
        return NULL;
    if (hold(&h, codes, 1, 0, "codes", &c, &count) < 0 ||
        hold(&h, escapes, itemsize, 0, "escapes", &e, &escape_count) < 0 ||
        hold(&h, old, itemsize, 0, "old", &b, &old_count) < 0 || hold(&h, new, itemsize, 1, "new", &n, &room) < 0 ||
        check_equal("old", old_count, count) < 0 || check_equal("new", room, count) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    refused = ulp_decode(c, e, escape_count, b, count, itemsize, n);
    Py_END_ALLOW_THREADS
    result = answer_none(refused);
done:
    release(&h);
    return result;
}

static int64_t smallest(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static PyObject *py_delta_compare(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *old, *new, *positions, *new_out, *old_out, *result = NULL;
    int itemsize, threads;
    held h = {.count = 0};
    void *a, *b, *p, *v, *w;
    int64_t n, new_n, room, new_room, old_room, count;
    if (!PyArg_ParseTuple(args, "OOiOOOi:delta_compare", &old, &new, &itemsize, &positions, &new_out, &old_out,
                          &threads) ||
        check_itemsize(itemsize) < 0)
        return NULL;
    if (hold(&h, old, itemsize, 0, "old", &a, &n) < 0 || hold(&h, new, itemsize, 0, "new", &b, &new_n) < 0 ||
        hold(&h, positions, 4, 1, "positions", &p, &room) < 0 ||
        hold(&h, new_out, itemsize, 1, "new_out", &v, &new_room) < 0 ||
        hold(&h, old_out, itemsize, 1, "old_out", &w, &old_room) < 0 || check_equal("new", new_n, n) < 0 ||
        check_elements(n) < 0)
        goto done;
    room = smallest(room, new_room);
    if (w)
        room = smallest(room, old_room);
    Py_BEGIN_ALLOW_THREADS
    count = delta_compare(a, b, n, itemsize, p, v, w, room, threads);
    Py_END_ALLOW_THREADS
    result = answer(count);
done:
    release(&h);
    return result;
}

static PyObject *py_delta_mask(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *words, *new, *positions, *new_out, *result = NULL;
    int itemsize, threads;
    held h = {.count = 0};
    void *m, *b, *p, *v;
    int64_t word_count, n, room, new_room, count;
    if (!PyArg_ParseTuple(args, "OOiOOi:delta_mask", &words, &new, &itemsize, &positions, &new_out, &threads) ||
        check_itemsize(itemsize) < 0)
        return NULL;
    if (hold(&h, words, 4, 0, "words", &m, &word_count) < 0 || hold(&h, new, itemsize, 0, "new", &b, &n) < 0 ||
        hold(&h, positions, 4, 1, "positions", &p, &room) < 0 ||
        hold(&h, new_out, itemsize, 1, "new_out", &v, &new_room) < 0 ||
        check_equal("words", word_count, (n + 31) / 32) < 0 || check_elements(n) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    count = delta_mask(m, b, n, itemsize, p, v, smallest(room, new_room), threads);
    Py_END_ALLOW_THREADS
    result = answer(count);
done:
    release(&h);
    return result;
}

static PyObject *py_delta_fused(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *old, *new, *gaps, *values, *escapes, *result = NULL;
    int itemsize, kind, threads, refused;
    held h = {.count = 0};
    void *a, *b, *g, *v, *e;
    int64_t n, new_n, gap_room, value_room, escape_room;
    fused_size size;
    if (!PyArg_ParseTuple(args, "OOiiOOOi:delta_fused", &old, &new, &itemsize, &kind, &gaps, &values, &escapes,
                          &threads) ||
        check_itemsize(itemsize) < 0 || check_kind(kind) < 0)
        return NULL;
    if (hold(&h, old, itemsize, 0, "old", &a, &n) < 0 || hold(&h, new, itemsize, 0, "new", &b, &new_n) < 0 ||
        hold(&h, gaps, 1, 1, "gaps", &g, &gap_room) < 0 ||
        hold(&h, values, kind == VALUES_ULP ? 1 : itemsize, 1, "values", &v, &value_room) < 0 ||
        hold(&h, escapes, itemsize, 1, "escapes", &e, &escape_room) < 0 || check_equal("new", new_n, n) < 0 ||
        check_elements(n) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    refused = delta_fused(a, b, n, itemsize, kind, g, gap_room, v, value_room, e, escape_room, threads, &size);
    Py_END_ALLOW_THREADS
    if (refused)
        answer(refused);
    else
        result = Py_BuildValue("LLL", (long long)size.count, (long long)size.gap_bytes, (long long)size.escapes);
done:
    release(&h);
    return result;
}

static PyObject *py_delta_apply(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *buffer, *positions, *values, *old_out, *result = NULL;
    int itemsize, kind, threads;
    held h = {.count = 0};
    void *b, *p, *v, *w;
    int64_t n, count, value_count, old_room, refused;
    if (!PyArg_ParseTuple(args, "OiOOiOi:delta_apply", &buffer, &itemsize, &positions, &values, &kind, &old_out,
                          &threads) ||
        check_itemsize(itemsize) < 0 || check_kind(kind) < 0)
        return NULL;
    if (hold(&h, buffer, itemsize, 1, "buffer", &b, &n) < 0 || hold(&h, positions, 4, 0, "positions", &p, &count) < 0 ||
        hold(&h, values, itemsize, 0, "values", &v, &value_count) < 0 ||
        hold(&h, old_out, itemsize, 1, "old_out", &w, &old_room) < 0 || check_equal("values", value_count, count) < 0 ||
        (w && check_equal("old_out", old_room, count) < 0) || check_elements(n) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    refused = delta_apply(b, n, itemsize, p, v, count, kind, w, threads);
    Py_END_ALLOW_THREADS
    result = answer_none(refused);
done:
    release(&h);
    return result;
}

static PyObject *py_delta_apply_gaps(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *buffer, *gaps, *values, *escapes, *result = NULL;
    int itemsize, kind, threads = 1;
    long long count;
    held h = {.count = 0};
    void *b, *g, *v, *e;
    int64_t n, gap_bytes, value_count, escape_count, refused;
    if (!PyArg_ParseTuple(args, "OiOOOLi|i:delta_apply_gaps", &buffer, &itemsize, &gaps, &values, &escapes,
                          &count, &kind, &threads) ||
        check_itemsize(itemsize) < 0 || check_kind(kind) < 0)
        return NULL;
    if (hold(&h, buffer, itemsize, 1, "buffer", &b, &n) < 0 || hold(&h, gaps, 1, 0, "gaps", &g, &gap_bytes) < 0 ||
        hold(&h, values, kind == VALUES_ULP ? 1 : itemsize, 0, "values", &v, &value_count) < 0 ||
        hold(&h, escapes, itemsize, 0, "escapes", &e, &escape_count) < 0 ||
        check_equal("values", value_count, count) < 0 || check_elements(n) < 0)
        goto done;
    if (kind != VALUES_ULP && check_equal("escapes", escape_count, 0) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    refused = delta_apply_gaps(b, n, itemsize, g, gap_bytes, v, e, escape_count, count, kind, threads);
    Py_END_ALLOW_THREADS
    result = answer_none(refused);
done:
    release(&h);
    return result;
}

static PyObject *py_delta_gather(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *buffer, *positions, *out, *result = NULL;
    int itemsize;
    held h = {.count = 0};
    void *b, *p, *o;
    int64_t n, count, room, refused;
    if (!PyArg_ParseTuple(args, "OiOO:delta_gather", &buffer, &itemsize, &positions, &out) ||
        check_itemsize(itemsize) < 0)
        return NULL;
    if (hold(&h, buffer, itemsize, 0, "buffer", &b, &n) < 0 || hold(&h, positions, 4, 0, "positions", &p, &count) < 0 ||
        hold(&h, out, itemsize, 1, "out", &o, &room) < 0 || check_equal("out", room, count) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    refused = delta_gather(b, n, itemsize, p, count, o);
    Py_END_ALLOW_THREADS
    result = answer_none(refused);
done:
    release(&h);
    return result;
}

PyObject *py_places_apply(PyObject *module, PyObject *args); /* placesmodule.c */

PyMethodDef delta_methods[] = {
    {"gaps_encode", py_gaps_encode, METH_VARARGS, "gaps_encode(positions, width, out) -> true size in bytes."},
    {"gaps_decode", py_gaps_decode, METH_VARARGS, "gaps_decode(data, width, elements, positions_out)."},
    {"rice_encode", py_rice_encode, METH_VARARGS, "rice_encode(positions, parameter, out) -> true size in bytes."},
    {"rice_decode", py_rice_decode, METH_VARARGS, "rice_decode(data, parameter, elements, positions_out)."},
    {"zigzag", py_zigzag, METH_VARARGS, "zigzag(new, old, itemsize, codes_out): full-width ulp codes."},
    {"unzigzag", py_unzigzag, METH_VARARGS, "unzigzag(codes, old, itemsize, new_out)."},
    {"ulp_encode", py_ulp_encode, METH_VARARGS, "ulp_encode(new, old, itemsize, codes, escapes) -> escapes needed."},
    {"ulp_decode", py_ulp_decode, METH_VARARGS, "ulp_decode(codes, escapes, old, itemsize, new_out)."},
    {"delta_compare", py_delta_compare, METH_VARARGS,
     "delta_compare(old, new, itemsize, positions, new_out, old_out | None, threads) -> true count."},
    {"delta_mask", py_delta_mask, METH_VARARGS,
     "delta_mask(words, new, itemsize, positions, new_out, threads) -> true count."},
    {"delta_fused", py_delta_fused, METH_VARARGS,
     "delta_fused(old, new, itemsize, kind, gaps, values, escapes, threads) -> (count, gap_bytes, escapes)."},
    {"delta_apply", py_delta_apply, METH_VARARGS,
     "delta_apply(buffer, itemsize, positions, values, kind, old_out | None, threads)."},
    {"delta_apply_gaps", py_delta_apply_gaps, METH_VARARGS,
     "delta_apply_gaps(buffer, itemsize, gaps, values, escapes, count, kind, threads=1)."},
    {"delta_gather", py_delta_gather, METH_VARARGS, "delta_gather(buffer, itemsize, positions, out)."},
    {"places_apply", py_places_apply, METH_VARARGS,
     "places_apply(entries, positions, codes, memory | None, old | None, index_out | None, new_out | None, sums, "
     "itemsize, kind, threads)."},
    {NULL, NULL, 0, NULL},
};
