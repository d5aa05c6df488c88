"""Link code in texts to its reference: public names such as `fpipe.simulate` or `split(8)`, and names of torch and of
Python's library that an inventory has."""

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform

from docs.site import reference

NOT_IN = (nodes.title, nodes.reference, addnodes.pending_xref, addnodes.desc_signature)


class LinkNames(SphinxPostTransform):
    """Wrap code that is a name in a reference, before Sphinx resolves references."""

    default_priority = 5

    def run(self, **options: object) -> None:
        """Link the names of one page."""
        for code in [*self.document.findall(nodes.literal)]:
            full = reference.target(code.astext()) or reference.elsewhere(code.astext())
            if full is None or any(isinstance(ancestor, NOT_IN) for ancestor in _ancestors_of(code)):
                continue
            link = addnodes.pending_xref("", refdomain="py", reftype="obj", reftarget=full, refdoc=self.env.docname)
            link["refexplicit"] = True
            code.replace_self(link)
            link += code


def _ancestors_of(node: nodes.Node) -> list[nodes.Node]:
    ancestors: list[nodes.Node] = []
    while node.parent is not None:
        ancestors.append(node := node.parent)
    return ancestors
