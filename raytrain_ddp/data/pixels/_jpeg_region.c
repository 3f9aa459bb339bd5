/* Decodes a rectangle of a baseline JPEG: exactly the pixels that decoding all of it would give.
 *
 * Nothing below the rectangle is read, and beside it nothing is transformed. Uses the libjpeg-turbo
 * that is named at run time, in practice that of Pillow's wheel, so none is linked or bundled. All
 * that is unusual (progressive, CMYK, damaged) is left to the caller, who decodes the whole image.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <setjmp.h>
#include <stdio.h>

#include <jconfig.h>
#define JCONFIG_INCLUDED
#undef JPEG_LIB_VERSION
#define JPEG_LIB_VERSION 62 /* the ABI of Pillow's wheels, whichever that of the headers is */
#include <jpeglib.h>

#define MARGIN 16 /* columns: more than the upsampling of the chroma looks at beside a pixel */
#define AT_ONCE 8 /* rows */

static struct {
    struct jpeg_error_mgr *(*std_error)(struct jpeg_error_mgr *);
    void (*create)(j_decompress_ptr, int, size_t);
    void (*destroy)(j_decompress_ptr);
    void (*source)(j_decompress_ptr, const unsigned char *, unsigned long);
    int (*header)(j_decompress_ptr, boolean);
    boolean (*start)(j_decompress_ptr);
    void (*crop)(j_decompress_ptr, JDIMENSION *, JDIMENSION *);
    JDIMENSION (*skip)(j_decompress_ptr, JDIMENSION);
    JDIMENSION (*read)(j_decompress_ptr, JSAMPARRAY, JDIMENSION);
} lib;

struct errors {
    struct jpeg_error_mgr base;
    jmp_buf leave;
};

static void leave(j_common_ptr info) { longjmp(((struct errors *)info->err)->leave, 1); }

/* A warning is a reason to leave, too. */
static void message(j_common_ptr info, int level)
{
    if (level < 0)
        leave(info);
}

static int fits(struct jpeg_decompress_struct *info)
{
    int gray = info->jpeg_color_space == JCS_GRAYSCALE && info->num_components == 1;
    int color = info->jpeg_color_space == JCS_YCbCr && info->num_components == 3;
    return (gray || color) && !info->progressive_mode && !info->arith_code
        && info->data_precision == 8;
}

/* Fills rows of `stride` bytes; returns the column of `out` at which the rectangle begins, or -1. */
static long decoded(const unsigned char *data, size_t size, unsigned char *out, size_t stride,
    long top, long left, long height, long width)
{
    struct jpeg_decompress_struct info;
    struct errors errors;
    JSAMPROW rows[AT_ONCE];
    volatile long begin = -1;

    if (size < 4 || data[size - 2] != 0xFF || data[size - 1] != 0xD9)
        return -1; /* truncated, or something follows the image */
    info.err = lib.std_error(&errors.base);
    errors.base.error_exit = leave;
    errors.base.emit_message = message;
    if (setjmp(errors.leave)) {
        lib.destroy(&info);
        return -1;
    }
    lib.create(&info, JPEG_LIB_VERSION, sizeof(info)); /* leaves if the library has another ABI */
    lib.source(&info, data, (unsigned long)size);
    lib.header(&info, TRUE);
    info.out_color_space = JCS_RGB;
    if (fits(&info)) {
        JDIMENSION x = (JDIMENSION)(left > MARGIN ? left - MARGIN : 0), columns;
        long end = left + width + MARGIN;

        lib.start(&info);
        if (end > (long)info.output_width)
            end = info.output_width;
        columns = (JDIMENSION)(end - x);
        if (left + width <= (long)info.output_width && top + height <= (long)info.output_height) {
            if (columns < info.output_width)
                lib.crop(&info, &x, &columns);
            if (3 * (size_t)columns <= stride) {
                if (top)
                    lib.skip(&info, (JDIMENSION)top);
                for (long row = 0; row < height;) {
                    long count = height - row < AT_ONCE ? height - row : AT_ONCE;
                    for (long i = 0; i < count; i++)
                        rows[i] = out + (size_t)(row + i) * stride;
                    row += lib.read(&info, rows, (JDIMENSION)count);
                }
                begin = left - (long)x;
            }
        }
    }
    lib.destroy(&info);
    return begin;
}

static PyObject *decode(PyObject *module, PyObject *args)
{
    Py_buffer data, out;
    long top, left, height, width, begin;

    if (!PyArg_ParseTuple(args, "y*w*llll", &data, &out, &top, &left, &height, &width))
        return NULL;
    if (!lib.read || top < 0 || left < 0 || height < 1 || width < 1
        || out.len % (3 * height) || out.len / (3 * height) < width) {
        PyErr_SetString(PyExc_ValueError, "not opened, or the arguments do not fit each other");
        begin = -2;
    } else {
        Py_BEGIN_ALLOW_THREADS
        begin = decoded(data.buf, (size_t)data.len, out.buf, (size_t)(out.len / height), top, left,
            height, width);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return begin == -2 ? NULL : PyLong_FromLong(begin);
}

static PyObject *open_library(PyObject *module, PyObject *args)
{
    const char *path;
    void *library;

    if (!PyArg_ParseTuple(args, "s", &path))
        return NULL;
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return PyErr_Format(PyExc_OSError, "%s", dlerror());
#define FIND(field, name)                                                                          \
    if (!(*(void **)&lib.field = dlsym(library, name))) {                                          \
        lib.read = NULL;                                                                           \
        return PyErr_Format(PyExc_OSError, "%s: no %s", path, name);                               \
    }
    FIND(std_error, "jpeg_std_error")
    FIND(create, "jpeg_CreateDecompress")
    FIND(destroy, "jpeg_destroy_decompress")
    FIND(source, "jpeg_mem_src")
    FIND(header, "jpeg_read_header")
    FIND(start, "jpeg_start_decompress")
    FIND(crop, "jpeg_crop_scanline")
    FIND(skip, "jpeg_skip_scanlines")
    FIND(read, "jpeg_read_scanlines")
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"open", open_library, METH_VARARGS, "open(path): the libjpeg-turbo to use; or OSError."},
    {"decode", decode, METH_VARARGS,
        "decode(data, out, top, left, height, width): fills `out`, uint8 (height, columns, 3), and\n"
        "returns the column at which the rectangle begins; -1 if it was not decoded."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_jpeg_region", NULL, -1, methods};

PyMODINIT_FUNC PyInit__jpeg_region(void) { return PyModule_Create(&definition); }
