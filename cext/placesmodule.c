/* The Python face of places.c: sizes of all buffers and indices of groups are checked here. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "delta.h"
#include "places.h"

static int check_size(const char *name, Py_ssize_t found, int64_t expected)
{
    if (found == expected)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, expected %lld", name, found, (long long)expected);
    return -1;
}

static int check_entries(const place_entry *entries, int64_t count, int64_t groups)
{
    for (int64_t i = 0; i < count; i++) {
        const place_entry *e = &entries[i];
        int wrong = e->ndim < 0 || e->ndim > MAX_DIMS || e->group < 0 || e->group >= groups || e->start < 0 ||
                    e->elements < 0 || e->elements > ((int64_t)1 << 32) || (i && e->start < entries[i - 1].start);
        for (int64_t d = 0; !wrong && d < e->ndim; d++)
            wrong = e->inner[d] < 1 || e->inner[d] >= ((int64_t)1 << 32) || (d == e->ndim - 1 && e->inner[d] != 1);
        if (wrong) {
            PyErr_Format(PyExc_ValueError, "entry %lld of %lld is no copy of a section", (long long)i,
                         (long long)count);
            return -1;
        }
    }
    return 0;
}

static int check_positions(const uint32_t *positions, int64_t count)
{
    for (int64_t i = 1; i < count; i++)
        if (positions[i] <= positions[i - 1]) {
            PyErr_SetString(PyExc_ValueError, delta_refusal(REFUSED_ORDER));
            return -1;
        }
    return 0;
}

static int check_job(const places_job *j, const Py_buffer views[8])
{
    int64_t bits = j->count * j->itemsize;
    if (check_size("codes", views[2].len, bits) < 0)
        return -1;
    if (j->memory == NULL)
        return check_size("old", views[4].len, bits);
    return check_size("index", views[5].len, j->count * 8) < 0 ? -1 : check_size("new", views[6].len, bits);
}

/* Takes entries, positions, codes, memory, old, index, new, sums; None where an optional one is absent. */
static int take_buffers(PyObject *objects[8], Py_buffer views[8])
{
    static const int writable[8] = {0, 0, 0, 1, 0, 1, 1, 1};
    for (int i = 0; i < 8; i++)
        if (objects[i] != Py_None &&
            PyObject_GetBuffer(objects[i], &views[i], writable[i] ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            return -1;
    return 0;
}

PyObject *py_places_apply(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *objects[8], *result = NULL;
    Py_buffer views[8] = {{0}};
    int itemsize, kind, threads;
    if (!PyArg_ParseTuple(args, "OOOOOOOOiii:places_apply", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4], &objects[5], &objects[6], &objects[7], &itemsize, &kind, &threads))
        return NULL;
    if (take_buffers(objects, views) < 0)
        goto done;
    if ((itemsize != 1 && itemsize != 2 && itemsize != 4 && itemsize != 8) || kind < VALUES_OVERWRITE ||
        kind > VALUES_ULP || views[0].len % (Py_ssize_t)sizeof(place_entry) != 0 || views[1].len % 4 != 0 ||
        views[3].len % itemsize != 0 || views[7].len % 8 != 0 || threads < 1) {
        PyErr_SetString(PyExc_ValueError, "places_apply: an element width, kind or buffer size that can't be");
        goto done;
    }
    places_job job = {
        .positions = views[1].buf, .count = views[1].len / 4, .itemsize = itemsize, .kind = kind,
        .codes = views[2].buf, .memory = views[3].buf, .elements = views[3].len / itemsize,
        .old = views[4].buf, .index = views[5].buf, .new_out = views[6].buf, .sums = views[7].buf,
    };
    int64_t count = views[0].len / (int64_t)sizeof(place_entry), refused;
    if (check_entries(views[0].buf, count, views[7].len / 8) < 0 || check_job(&job, views) < 0 ||
        check_positions(job.positions, job.count) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    refused = run_places(views[0].buf, count, &job, threads);
    Py_END_ALLOW_THREADS
    if (refused < 0)
        PyErr_SetString(PyExc_ValueError, delta_refusal(refused));
    else
        result = Py_NewRef(Py_None);
done:
    for (int i = 0; i < 8; i++)
        if (views[i].obj != NULL)
            PyBuffer_Release(&views[i]);
    return result;
}
