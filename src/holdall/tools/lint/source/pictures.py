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

from holdall.tools.lint.run import UNKNOWN, Reference, known, whole
from holdall.tools.lint.source.values import ArrayValue, CallArguments, InstanceValue, best_array, known_items, likely

PICTURE = Reference("PIL.Image.Image")
_UINT8, _FLOAT32, _FLOAT64 = np.dtype("uint8"), np.dtype("float32"), np.dtype("float64")
_PACKAGES = {"cv2", "PIL", "skimage", "torchvision", "scipy", "tensorflow", "imageio", "pygame"}
_SAME_SHAPE = {
    "GaussianBlur", "medianBlur", "blur", "bitwise_not", "flip", "absdiff", "normalize", "equalizeHist", "dilate",
    "erode", "adaptiveThreshold", "bitwise_and", "bitwise_or", "filter2D", "rotate", "convertScaleAbs",
}  # fmt: skip
_NOTHING = ArrayValue()  # a picture of which nothing is known


def call(interpreter: Any, dotted: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Return what a function of a library of pictures makes; NotImplemented if it is none of these."""
    package, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    if package not in _PACKAGES or (last[:1].isupper() and package != "cv2"):
        return NotImplemented
    image, is_torch = _array(interpreter, arguments.get(0, "src image img pic")), package == "torchvision"
    if package == "cv2":
        return _of_opencv(last, image, arguments, node)
    if package == "PIL":
        made = image if last == "fromarray" else grey(image, node)
        return _picture(made, node) if last in {"fromarray", "grayscale"} else UNKNOWN
    match last:
        case "array3d" | "pixels3d":
            return ArrayValue.new(node, (UNKNOWN, UNKNOWN, 3), _UINT8)
        case "resize" | "imresize" | "resize_images" | "resize_with_pad":
            is_scaled = package == "tensorflow" and "NEAREST" not in str(arguments.get(2, "method", "")).upper()
            dtype = _FLOAT64 if package == "skimage" else _FLOAT32 if is_scaled else None
            return _resized(image, arguments.get(1, "size output_shape"), node, dtype, channels_first=is_torch)
        case "resized_crop" | "center_crop" | "crop" if is_torch:
            size = arguments.get(5 if last == "resized_crop" else 1, "size" if last != "crop" else "output_size")
            sides = (arguments.get(3, "height"), arguments.get(4, "width")) if last == "crop" else size
            return _resized(image, (sides, sides) if whole(sides) is not None else sides, node, channels_first=True)
        case _ if last.endswith(("_to_bounding_box", "_with_crop_or_pad")):
            at = 3 if "box" in last else 1
            return _resized(image, (arguments.get(at, "target_height"), arguments.get(at + 1, "target_width")), node)
        case "rgb2gray" | "rgb_to_grayscale" | "to_grayscale":
            made = grey(image, node)
            if package == "skimage":
                return replace(made, dtype=_FLOAT64)
            if is_torch:
                return replace(made, shape=(1, *(image.shape or (1, UNKNOWN, UNKNOWN))[1:]), is_tensor=True)
            return replace(made, shape=(*(made.shape or ()), 1))
        case "rescale_intensity" | "img_as_float" | "equalize_hist" | "img_as_ubyte" if image is not _NOTHING:
            return image.made_by(node, dtype=_UINT8 if last == "img_as_ubyte" else _FLOAT64)
        case "convert_image_dtype" | "to_dtype" if image is not _NOTHING:
            return image.made_by(node, dtype=_FLOAT32)
        case "to_tensor" | "pil_to_tensor":
            return _tensor(image, node, _FLOAT32 if last == "to_tensor" else _UINT8)
    return NotImplemented if package in {"scipy", "torchvision", "pygame"} else UNKNOWN


def _array(interpreter: Any, value: Any) -> ArrayValue:
    """Return the pixels of a picture, or what was observed."""
    value = best_array(value)
    if isinstance(value, InstanceValue):
        value = interpreter.converted_to_array(value)
    return value if isinstance(value, ArrayValue) else _NOTHING


def grey(image: ArrayValue, node: ast.AST) -> ArrayValue:
    """Return a picture without its channels."""
    if image.shape is not None:
        return image.made_by(node, shape=image.shape[:2])
    return ArrayValue.new(node, (UNKNOWN, UNKNOWN), image.dtype or _UINT8)


def _sides(size: Any) -> tuple[Any, ...] | None:
    """Return the two sides that an argument names."""
    items = known_items(likely(size))
    return None if items is None or len(items) < 2 else tuple(likely(one) for one in items)


def _resized(image: ArrayValue, size: Any, node: ast.AST, dtype: Any = None, channels_first: bool = False) -> Any:
    """Return a picture of another size: rows and columns, and channels as they are unless they are named."""
    sides, axes = _sides(size), image.shape
    if channels_first and axes and whole(size) is not None:
        sides = _shorter_side(axes[-2:], whole(size) or 0)
    if sides is None:
        return ArrayValue.new(node, None, dtype)
    if channels_first:
        shape = (*(axes[:-2] if axes else (UNKNOWN,)), *sides[:2])
    else:
        shape = sides if len(sides) == 3 else (*sides, *(axes[2:] if axes else (UNKNOWN,)))
    wanted = dtype or image.dtype or _UINT8
    return ArrayValue.new(node, shape, wanted, is_tensor=image.is_tensor or channels_first)


def _shorter_side(sides: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    rows, columns = (whole(one) for one in sides)
    if not rows or not columns:
        return (UNKNOWN, UNKNOWN)
    return (size, size * columns // rows) if rows <= columns else (size * rows // columns, size)


# ------------------------------------------------------------ OpenCV


def _of_opencv(last: str, image: ArrayValue, arguments: CallArguments, node: ast.AST) -> Any:
    if last == "resize":
        return _opencv_resized(image, arguments, node)
    if last == "cvtColor":
        code = arguments.likely(1, "code")
        name = code.last if isinstance(code, Reference) else ""
        if name.endswith("GRAY"):
            return grey(image, node)
        if image.shape is None:
            return ArrayValue.new(node, (UNKNOWN, UNKNOWN, 3), _UINT8)
        return image.made_by(node, shape=(*image.shape[:2], 3 if "2" in name else UNKNOWN))
    if last in {"Canny", "inRange"}:
        return replace(grey(image, node), dtype=_UINT8)
    if last == "threshold":
        return (UNKNOWN, UNKNOWN if image is _NOTHING else image.made_by(node))
    return image.made_by(node) if image.shape is not None and last in _SAME_SHAPE else UNKNOWN


def _opencv_resized(image: ArrayValue, arguments: CallArguments, node: ast.AST) -> ArrayValue:
    """OpenCV takes columns before rows, or factors, and drops an axis of one channel."""
    sides = _sides(arguments.get(1, "dsize", None))
    if sides is None and image.shape and len(image.shape) >= 2:
        factors = [arguments.get(at, name, UNKNOWN) for at, name in ((3, "fx"), (4, "fy"))]
        numbers = [whole(one) for one in image.shape[1::-1]]
        if None not in numbers and all(isinstance(one, int | float) for one in factors):
            sides = tuple(round((n or 0) * factor) for n, factor in zip(numbers, factors, strict=True))
    if sides is None:
        return ArrayValue.new(node, None, _UINT8)
    made: ArrayValue = _resized(image, (sides[1], sides[0]), node)
    is_flat = made.shape is not None and len(made.shape) == 3 and made.shape[2] == 1
    return replace(made, shape=(made.shape or ())[:2]) if is_flat else made


# ------------------------------------------------------------ Pillow


def _picture(array: ArrayValue, node: ast.AST) -> InstanceValue:
    return InstanceValue(PICTURE, {"array": UNKNOWN if array is _NOTHING else array}, node=node)


def picture_method(owner: InstanceValue, name: str, arguments: CallArguments, node: ast.AST) -> Any:
    """Return what a method of Pillow's pictures returns."""
    held, first = owner.attributes["array"], arguments.get(0, "size")
    array = held if isinstance(held, ArrayValue) else _NOTHING
    if name == "resize" and (sides := _sides(first)) is not None:
        return _picture(_resized(array, (sides[1], sides[0]), node), node)
    if name == "convert":
        made = grey(array, node)
        channels = () if first in {"L", "1"} else (3 if first == "RGB" else UNKNOWN,)
        return _picture(replace(made, shape=(*(made.shape or ()), *channels)), node)
    if name == "crop" and (box := known_items(likely(first))) is not None and len(box) == 4:
        left, top, right, bottom = map(known, box)
        return _picture(_resized(array, (bottom - top, right - left), node), node)
    return owner if name in {"copy", "transpose", "rotate", "filter"} else UNKNOWN


# ------------------------------------------------------------ torchvision


def transformed(interpreter: Any, transform: InstanceValue, value: Any, node: ast.AST) -> Any:
    """Return what one of torchvision's transforms makes of a picture."""
    kind, given = transform.kind.rpartition(".")[2], transform.arguments
    first = given.get("0", UNKNOWN)
    if kind == "Compose":
        for one in known_items(given.get("transforms", first)) or ():
            value = interpreter.call(one, CallArguments([value]), node)
        return value
    image = _array(interpreter, value)
    axes = image.shape or (UNKNOWN, UNKNOWN)
    is_picture = isinstance(value, InstanceValue) and value.kind == PICTURE.dotted
    match kind:
        case "ToPILImage":
            is_turned = len(axes) == 3 and image.is_tensor
            return _picture(replace(image, shape=(*axes[1:], axes[0])) if is_turned else image, node)
        case "Grayscale":
            if is_picture:
                return _picture(grey(image, node), node)
            count = whole(given.get("num_output_channels", 1 if first is UNKNOWN else first)) or 1
            return replace(grey(image, node), shape=(*axes[:-3], count, *axes[-2:]), is_tensor=True)
        case "Resize" | "CenterCrop" | "RandomCrop":
            size = given.get("size", first)
            side = whole(size)
            if is_picture:
                sides = size if side is None else _shorter_side(axes[:2], side)
                return _picture(_resized(image, sides, node), node)
            size = (size, size) if kind != "Resize" and side is not None else size
            return _resized(image, size, node, None, channels_first=True)
        case "ToTensor" | "PILToTensor" | "ToImage":
            return _tensor(image, node, _FLOAT32 if kind == "ToTensor" else _UINT8)
        case "Normalize" | "ConvertImageDtype" | "ToDtype":
            return UNKNOWN if image is _NOTHING else image.made_by(node, dtype=_FLOAT32)
        case "Lambda":
            return interpreter.call(given.get("lambd", first), CallArguments([value]), node)
    return UNKNOWN


def _tensor(image: ArrayValue, node: ast.AST, dtype: Any) -> ArrayValue:
    """Return a picture as a tensor: its channels first, scaled to floats."""
    if image.shape is None:
        return ArrayValue.new(node, None, dtype, is_tensor=True)
    axes = image.shape if len(image.shape) == 3 else (*image.shape, 1)
    made = dtype if image.dtype in {None, _UINT8} else image.dtype
    return ArrayValue.new(node, (axes[-1], *axes[:-1]), made, is_tensor=True)
