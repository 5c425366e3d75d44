-- A server could not answer a slice of the evaluation under way. args: id (of the ticket), patience (failures before one
-- counts), retries (how often the slice is handed out again; after that its tasks count as failed, or the evaluation would
-- never end).
-- Returns 'again' (patience is left), 'filtered' or 'void'.
local version = redis.call('HGET', key('meta'), 'evaluated')
if not version then return 'void' end
for _, slice in ipairs(redis.call('ZRANGE', key('eval_issued:' .. version), 0, -1)) do
  if slice_ticket(version, slice) == args.id then
    local failures = redis.call('HINCRBY', key('eval_failures:' .. version), slice, 1) - args.patience
    if failures <= 0 then return 'again' end
    if failures <= args.retries then
      return_slice(version, slice)
    else
      end_slice(version, slice)
      settle_tasks(version, 0, slice:match(':(%d+)'))
    end
    return 'filtered'
  end
end
return 'void'
