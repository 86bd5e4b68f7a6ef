"""Pictures: what OpenCV, Pillow, scikit-image, torchvision and TensorFlow make of them, by shape and dtype.

In:  the full name of a function, or an object of Pillow or torchvision, and the arguments.
Out: an ArrayValue, an object that stands for a picture of Pillow, or UNKNOWN. A function that fixes a size or the
number of channels does so for a picture of which nothing is known, too.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import numpy as np

from holdall.tools.lint.run import UNKNOWN, OneOf, Reference, whole
from holdall.tools.lint.source.values import ArrayValue, CallArguments, InstanceValue, best_array, known_items, likely

PICTURE = Reference("PIL.Image.Image")
_UINT8, _FLOAT32, _FLOAT64 = np.dtype("uint8"), np.dtype("float32"), np.dtype("float64")
_PACKAGES = {"cv2", "PIL", "skimage", "torchvision", "scipy", "tensorflow", "imageio", "pygame"}
_SAME_SHAPE = {
    "GaussianBlur", "medianBlur", "blur", "bitwise_not", "flip", "absdiff", "normalize", "equalizeHist", "dilate",
    "erode", "adaptiveThreshold", "bitwise_and", "bitwise_or", "filter2D", "rotate", "convertScaleAbs",
}  # fmt: skip


def call(interpreter: Any, dotted: str, arguments: Any, node: ast.AST) -> Any:  # noqa: C901, PLR0911  one case a function
    """Return what a function of a library of pictures makes; NotImplemented if it is none of these."""
    package, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    if package not in _PACKAGES or (last[:1].isupper() and package != "cv2"):
        return NotImplemented
    image = _array(
        interpreter, arguments.get(0, next((k for k in ("src", "image", "img", "pic") if k in arguments.named), ""))
    )
    if package == "cv2":
        return _of_opencv(last, image, arguments, node)
    if package == "PIL":
        if last in {"fromarray", "grayscale"}:
            return _picture(image if last == "fromarray" else grey(image, node), node)
        return UNKNOWN
    if last in {"array3d", "pixels3d"}:
        return ArrayValue((UNKNOWN, UNKNOWN, 3), _UINT8, frozenset({node}))
    is_torch = package == "torchvision"
    match last:
        case "resize" | "imresize" | "resize_images" | "resize_with_pad":
            is_scaled = package == "tensorflow" and "NEAREST" not in str(arguments.get(2, "method", "")).upper()
            dtype = _FLOAT64 if package == "skimage" else _FLOAT32 if is_scaled else None
            size = arguments.get(1, next((k for k in ("size", "output_shape") if k in arguments.named), "size"))
            return _resized(image, size, node, dtype, channels_first=is_torch)
        case "resized_crop" | "center_crop" | "crop" if is_torch:
            size = arguments.get(5 if last == "resized_crop" else 1, "size" if last != "crop" else "output_size")
            sides = (arguments.get(3, "height"), arguments.get(4, "width")) if last == "crop" else size
            return _resized(image, (sides, sides) if whole(sides) is not None else sides, node, channels_first=True)
        case _ if last.endswith(("_to_bounding_box", "_with_crop_or_pad")):
            at = 3 if "box" in last else 1
            return _resized(image, (arguments.get(at, "target_height"), arguments.get(at + 1, "target_width")), node)
        case "rgb2gray" | "rgb_to_grayscale" | "to_grayscale":
            return _all_grey(package, image, node)
        case "rescale_intensity" | "img_as_float" | "equalize_hist" | "img_as_ubyte" if isinstance(image, ArrayValue):
            return image.made_by(node, dtype=_UINT8 if last == "img_as_ubyte" else _FLOAT64)
        case "convert_image_dtype" | "to_dtype" if isinstance(image, ArrayValue):
            return image.made_by(node, dtype=_FLOAT32)
        case "to_tensor" | "pil_to_tensor":
            return _tensor(image, node, _FLOAT32 if last == "to_tensor" else _UINT8)
    return NotImplemented if package in {"scipy", "torchvision", "pygame"} else UNKNOWN


def _all_grey(package: str, image: Any, node: ast.AST) -> Any:
    made = grey(image, node)
    if package == "skimage":
        return replace(made, dtype=_FLOAT64)
    if package == "torchvision":
        axes = image.shape[1:] if isinstance(image, ArrayValue) and image.shape else (UNKNOWN, UNKNOWN)
        return replace(made, shape=(1, *axes), is_tensor=True)
    return replace(made, shape=(*(made.shape or ()), 1))


def _array(interpreter: Any, value: Any) -> Any:
    """Return the pixels of a picture, or what was observed."""
    if isinstance(value, OneOf):
        value = best_array(value)
    value = getattr(value, "observation", value) if isinstance(value, tuple) else value
    if isinstance(value, InstanceValue):
        value = interpreter.converted_to_array(value)
    return value if isinstance(value, ArrayValue) else UNKNOWN


def grey(image: Any, node: ast.AST) -> ArrayValue:
    """Return a picture without its channels."""
    if isinstance(image, ArrayValue) and image.shape is not None:
        return image.made_by(node, shape=image.shape[:2])
    dtype = image.dtype if isinstance(image, ArrayValue) and image.dtype is not None else _UINT8
    return ArrayValue((UNKNOWN, UNKNOWN), dtype, frozenset({node}))


def _sides(size: Any) -> tuple[Any, ...] | None:
    """Return the two sides that an argument names."""
    items = known_items(likely(size))
    return None if items is None or len(items) < 2 else tuple(likely(one) for one in items)


def _resized(image: Any, size: Any, node: ast.AST, dtype: Any = None, channels_first: bool = False) -> Any:
    """Return a picture of another size: rows and columns, and channels as they are unless they are named."""
    sides = _sides(size)
    known = image.shape if isinstance(image, ArrayValue) else None
    if channels_first and known and whole(size) is not None:
        sides = _shorter_side(known[-2:], whole(size) or 0)
    if sides is None:
        return ArrayValue(None, dtype, frozenset({node}))
    wanted = dtype or (image.dtype if isinstance(image, ArrayValue) else None) or _UINT8
    tensor = isinstance(image, ArrayValue) and image.is_tensor
    if channels_first:
        shape = (*(known[:-2] if known else (UNKNOWN,)), *sides[:2])
    elif len(sides) == 3:
        shape = sides
    else:
        shape = (*sides, *(known[2:] if known else (UNKNOWN,)))
    return ArrayValue(tuple(shape), wanted, frozenset({node}), is_tensor=tensor or channels_first)


def _shorter_side(sides: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    rows, columns = (whole(one) for one in sides)
    if not rows or not columns:
        return (UNKNOWN, UNKNOWN)
    return (size, size * columns // rows) if rows <= columns else (size * rows // columns, size)


# ------------------------------------------------------------ OpenCV


def _of_opencv(last: str, image: Any, arguments: Any, node: ast.AST) -> Any:
    if last == "resize":
        return _opencv_resized(image, arguments, node)
    if last == "cvtColor":
        code = likely(arguments.get(1, "code"))
        name = code.last if isinstance(code, Reference) else ""
        if name.endswith("GRAY"):
            return grey(image, node)
        if not isinstance(image, ArrayValue) or image.shape is None:
            return ArrayValue((UNKNOWN, UNKNOWN, 3), _UINT8, frozenset({node}))
        return image.made_by(node, shape=(*image.shape[:2], 3 if "2" in name else UNKNOWN))
    is_image = isinstance(image, ArrayValue) and image.shape is not None
    if last in {"Canny", "inRange"}:
        return replace(grey(image, node), dtype=_UINT8)
    if last == "threshold":
        return (UNKNOWN, image.made_by(node) if isinstance(image, ArrayValue) else UNKNOWN)
    return image.made_by(node) if is_image and last in _SAME_SHAPE else UNKNOWN


def _opencv_resized(image: Any, arguments: Any, node: ast.AST) -> Any:
    """OpenCV takes columns before rows, or factors, and drops an axis of one channel."""
    sides = _sides(arguments.get(1, "dsize", None))
    known = image.shape if isinstance(image, ArrayValue) else None
    if sides is None and known and len(known) >= 2:
        factors = [arguments.get(at, name, UNKNOWN) for at, name in ((4, "fy"), (3, "fx"))]
        numbers = [whole(one) for one in known[:2]]
        if None not in numbers and all(isinstance(one, int | float) for one in factors):
            rows, columns = (round((n or 0) * f) for n, f in zip(numbers, factors, strict=True))
            sides = (columns, rows)
    if sides is None:
        return ArrayValue(None, _UINT8, frozenset({node}))
    made = _resized(image, (sides[1], sides[0]), node)
    is_flat = made.shape is not None and len(made.shape) == 3 and made.shape[2] == 1
    return replace(made, shape=made.shape[:2]) if is_flat else made


# ------------------------------------------------------------ Pillow


def _picture(array: Any, node: ast.AST) -> InstanceValue:
    return InstanceValue(PICTURE, {"array": array}, node=node)


def picture_method(owner: InstanceValue, name: str, arguments: Any, node: ast.AST) -> Any:
    """Return what a method of Pillow's pictures returns."""
    array, first = owner.attributes["array"], arguments.get(0, "", UNKNOWN)
    if name == "resize" and (sides := _sides(arguments.get(0, "size"))) is not None:
        return _picture(_resized(array, (sides[1], sides[0]), node), node)
    if name == "convert":
        made = grey(array, node)
        if first in {"L", "1"}:
            return _picture(made, node)
        return _picture(replace(made, shape=(*(made.shape or ()), 3 if first == "RGB" else UNKNOWN)), node)
    if name == "crop" and (box := known_items(likely(first))) is not None and len(box) == 4:
        left, top, right, bottom = (whole(one) for one in box)
        if None not in {left, top, right, bottom}:
            return _picture(_resized(array, ((bottom or 0) - (top or 0), (right or 0) - (left or 0)), node), node)
    return owner if name in {"copy", "transpose", "rotate", "filter"} else UNKNOWN


# ------------------------------------------------------------ torchvision


def transformed(interpreter: Any, transform: InstanceValue, value: Any, node: ast.AST) -> Any:  # noqa: C901, PLR0911  one case a transform
    """Return what one of torchvision's transforms makes of a picture."""
    kind = transform.kind.rpartition(".")[2]
    first = transform.arguments.get("0", UNKNOWN)
    if kind == "Compose":
        for one in known_items(transform.arguments.get("transforms", first)) or ():
            value = interpreter.call(one, CallArguments([value]), node)
        return value
    image = _array(interpreter, value)
    is_picture = isinstance(value, InstanceValue) and value.kind == PICTURE.dotted
    match kind:
        case "ToPILImage":
            axes = image.shape if isinstance(image, ArrayValue) else None
            if axes and len(axes) == 3 and image.is_tensor:
                image = replace(image, shape=(*axes[1:], axes[0]))
            return _picture(image, node)
        case "Grayscale":
            if is_picture:
                return _picture(grey(image, node), node)
            count = whole(transform.arguments.get("num_output_channels", 1 if first is UNKNOWN else first)) or 1
            axes = image.shape if isinstance(image, ArrayValue) and image.shape else (UNKNOWN, UNKNOWN)
            return replace(grey(image, node), shape=(*axes[:-3], count, *axes[-2:]), is_tensor=True)
        case "Resize" | "CenterCrop" | "RandomCrop":
            size = transform.arguments.get("size", first)
            if is_picture:
                known = image.shape if isinstance(image, ArrayValue) and image.shape else (UNKNOWN, UNKNOWN)
                sides = _shorter_side(known[:2], whole(size) or 0) if whole(size) is not None else size
                return _picture(_resized(image, sides, node), node)
            if kind != "Resize" and whole(size) is not None:
                size = (size, size)
            return _resized(image, size, node, None, channels_first=True)
        case "ToTensor" | "PILToTensor" | "ToImage":
            return _tensor(image, node, _FLOAT32 if kind == "ToTensor" else _UINT8)
        case "Normalize" | "ConvertImageDtype" | "ToDtype":
            return image.made_by(node, dtype=_FLOAT32) if isinstance(image, ArrayValue) else UNKNOWN
        case "Lambda":
            return interpreter.call(transform.arguments.get("lambd", first), CallArguments([value]), node)
    return UNKNOWN


def _tensor(image: Any, node: ast.AST, dtype: Any) -> Any:
    """Return a picture as a tensor: its channels first, scaled to floats."""
    if not isinstance(image, ArrayValue) or image.shape is None:
        return ArrayValue(None, dtype, frozenset({node}), is_tensor=True)
    axes = image.shape if len(image.shape) == 3 else (*image.shape, 1)
    made = dtype if image.dtype in {None, _UINT8} else image.dtype
    return ArrayValue((axes[-1], *axes[:-1]), made, frozenset({node}), is_tensor=True)
