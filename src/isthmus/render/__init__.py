"""Rendering: a part of a job becomes the image, the configuration and the job file that its site starts it with."""

from isthmus.render.blueprint import Blueprint, make_blueprints
from isthmus.render.check_passing import SPEC_FIELDS, StartKind
from isthmus.render.code_registration import CodeRegistration
from isthmus.render.find_image import find_image
from isthmus.render.image import IMAGE_LABEL, SPEC_FILE, Image, ImageFacts, host_image
from isthmus.render.oci_runtime import Container, ContainerUser, oci_config
from isthmus.render.render_part import CODE_MOUNT, RenderedPart, SiteRuntime, mount, render_part
from isthmus.render.setting import Setting, settings_document
from isthmus.render.template import Template, TemplateConflictError
from isthmus.render.training_settings import training_settings

__all__ = [
    "CODE_MOUNT",
    "IMAGE_LABEL",
    "SPEC_FIELDS",
    "SPEC_FILE",
    "Blueprint",
    "CodeRegistration",
    "Container",
    "ContainerUser",
    "Image",
    "ImageFacts",
    "RenderedPart",
    "Setting",
    "SiteRuntime",
    "StartKind",
    "Template",
    "TemplateConflictError",
    "find_image",
    "host_image",
    "make_blueprints",
    "mount",
    "oci_config",
    "render_part",
    "settings_document",
    "training_settings",
]
