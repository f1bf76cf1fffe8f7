"""Images with text and images with sound: contrastive towers, captions and answers, early fusion."""
