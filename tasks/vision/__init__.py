"""Image classification by timm's Vision Transformers, with our attention in them."""
