-- Records that a server failed a slice of the current evaluation. args: id (of the ticket), reason, ignored_failures (failures
-- to ignore), retries (how often a failed slice is granted again; after that its tasks count as failed for this reason,
-- so that the evaluation ends), origin, lost (as in evaluated.lua).
-- Returns 'again' (ignored), 'filtered' or 'void'.
local version, origin = redis.call('HGET', key('meta'), 'evaluated'), args.origin
local function void()  -- the group may be one to train on
  return args.id:sub(1, 1) == 'e' and settle_late('void', args.id, origin) or 'void'
end
if not version then return void() end
for _, slice in ipairs(redis.call('ZRANGE', key('eval_issued:' .. version), 0, -1)) do
  if slice_ticket(version, slice) == args.id then
    local failures = redis.call('HINCRBY', key('eval_failures:' .. version), slice:match('%d+'), 1) - args.ignored_failures
    if failures <= 0 then return 'again' end
    settle(args.id, origin, args.lost, 0)
    if failures <= args.retries then
      return_slice(version, slice)
    else
      end_slice(version, slice)
      count_eval_tasks(version, 0, {[args.reason] = tonumber(slice:match(':(%d+)'))})
    end
    return 'filtered'
  end
end
return void()
